"""The current process: its end, supervisor, processors, memory and signals, and processes that outlive it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from muster.errors import say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop."""
LOADER_WORKER = "muster-loader"
"""The name by which the kernel knows them."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**25
"""Bytes: the highest M_MMAP_THRESHOLD that glibc takes (DEFAULT_MMAP_THRESHOLD_MAX of its malloc)."""
THRESHOLDS = "trim_threshold", "mmap_threshold"
_keeps_memory = False
WORKER_WAIT = "MP_STATUS_CHECK_INTERVAL"
"""torch's constant: the longest wait for a DataLoader worker, before it is killed."""
WORKER_LEAVES_S = 0.1
END_S, LEFT_S = 60.0, 5.0
"""Most seconds for threads and `atexit` functions at the end; less after a failure, when others may wait for this process."""
IO_BASE: Any = io.IOBase.__base__
"""Base of all files; `isinstance` would read each object's `__class__`, which makes some warn."""
_launcher: int | None = None
_is_first = True
_is_supervisor = False
_witness: list[None] = []
"""Created after `freeze`: no longer in `gc.get_objects` once a script freezes, too, and with it the files that the script had opened."""
_frozen_files: list[weakref.ref[Any]] = []


def end(code: int) -> NoReturn:
    """End this process with `code`: join threads, run `atexit` functions and flush files, but skip the interpreter's tear-down.

    The tear-down restores SIGTERM's default action, so that the launcher's signal would hide the code, and C++ threads may
    abort the process in it. A supervisor skips all of this: its children have done it. Outside of the main thread, only files
    are flushed. After END_S, or LEFT_S with another code than 0, the process ends in any case.
    """
    try:
        if not _is_supervisor:
            threading.Thread(target=_end_late, args=(code, LEFT_S if code else END_S), daemon=True).start()
            if threading.current_thread() is threading.main_thread():
                threading._shutdown()  # type: ignore[attr-defined]  # in this order, as in Py_FinalizeEx
                _end_loader_workers()
                atexit._run_exitfuncs()
            flush_files()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_late(code: int, within_s: float) -> None:
    time.sleep(within_s)
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    what = f"the thread {threads[0]} has" if threads else "functions of atexit have"
    print(
        f"muster: {what} not ended {within_s:g} s after the run: the process ends without them",
        file=sys.stderr,
        flush=True,
    )
    os._exit(code)


@cache
def end_loader_workers_at_exit() -> None:
    """Kill them also where Python itself ends this process, as after a script's last line: before multiprocessing waits for them."""
    atexit.register(_end_loader_workers)


def _end_loader_workers() -> None:
    """Kill the loader workers of this process, which ignore SIGTERM: multiprocessing would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker has ended
    for each in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{each.pid}/comm").read_text(encoding="utf-8").strip()
            is_own = (
                getattr(each, "_parent_pid", None) == os.getpid()
            )  # not that of the process which has forked this one
            if is_own and name == LOADER_WORKER:
                each.kill()


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (R, S, T, Z...) on; empty if the process is gone. See proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def flush_files() -> None:
    for each in [*(there() for there in _frozen_files), *_files()]:
        with contextlib.suppress(Exception):
            if not each.closed:
                each.flush()


def freeze() -> None:
    """Exclude all current objects from garbage collection, which in a forked process would copy them. Open files are still flushed."""
    global _witness
    for each in _files():
        with contextlib.suppress(TypeError):
            _frozen_files.append(weakref.ref(each))
    gc.freeze()
    _witness = []


def _files() -> list[Any]:
    objects = gc.get_objects()
    if not any(each is _witness for each in objects):
        gc.unfreeze()
        objects = gc.get_objects()
    return [each for each in objects if issubclass(type(each), IO_BASE)]


def collect_garbage() -> None:
    """Collect garbage without waiting for DataLoader workers in it: their queue is closed, and torch waits 5 s for each."""
    shared = sys.modules.get("torch.utils.data._utils")
    before = vars(shared)[WORKER_WAIT] if shared else 0.0
    if shared:
        setattr(shared, WORKER_WAIT, WORKER_LEAVES_S)
    try:
        gc.collect()
    finally:
        if shared:
            setattr(shared, WORKER_WAIT, before)


def launcher_pid() -> int:
    """Return the pid of the process that started this rank: its parent, or its supervisor's (recovery/supervisor.py)."""
    return os.getppid() if _launcher is None else _launcher


def ranks_on_host() -> int:
    """Return the launcher's ranks on this host; 1 without a launcher."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdigit() and int(number) else 1


def worker_pid() -> int:
    """Return the pid of the process that the launcher started: this one, or its supervisor."""
    return os.getpid() if _launcher is None else os.getppid()


def is_supervised() -> bool:
    return _launcher is not None


def become_supervisor() -> None:
    global _is_supervisor
    _is_supervisor = True


def become_supervised(launcher: int, *, is_first: bool) -> None:
    """Note that this process is a child of a supervisor, which `launcher` started; `is_first`: its first one."""
    global _launcher, _is_first, _is_supervisor
    _launcher, _is_first, _is_supervisor = launcher, is_first, False


def beginning_pid() -> int:
    """Return the pid of the process that began this one's work: a supervisor does the imports of its first child."""
    return worker_pid() if _is_first else os.getpid()


def command_line() -> list[str]:
    """Return the launcher's words for a rank, else this process's own.

    Empty if unknown, or if they would not start the job again: a user's program starts the agent of `muster.launch`.
    """
    words = list(sys.orig_argv)
    if "RANK" in os.environ:
        try:
            words = Path(f"/proc/{launcher_pid()}/cmdline").read_text(encoding="utf-8").rstrip("\0").split("\0")
        except OSError:
            return []
    if not words or any(word.startswith("muster.launcher.") for word in words):
        return []
    if Path(words[0]).name.startswith("python"):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        shown = Path(script).name == "torchrun" and words.index(script) == 1
        return ["torchrun", *words[2:]] if shown else ["python", *words[1:]]
    return words


def usable_processors() -> list[int]:
    """Return the numbers of the processors that this process may use; on macOS all of the machine's."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def handle_of(pid: int) -> int:
    """Return a file descriptor that is readable when process `pid` has ended (pidfd_open(2)).

    Raises OSError: Linux older than 5.3, or a container forbids it.
    """
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def die_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Make the kernel send signal `number` to this process when the thread that started it ends. Linux only.

    `parent`: the parent's pid, if known; if it has died already, this process sends itself the signal.
    Source: PR_SET_PDEATHSIG in prctl(2).
    """
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def call_it(name: str) -> None:
    """Show `name` (at most 15 ASCII characters) for this process in ps, top, pkill and the kernel's log. Linux only."""
    if LIBC:
        LIBC.prctl(PR_SET_NAME, name.encode())


def keep_memory(is_wanted: bool) -> None:
    """Have glibc keep freed memory for the next allocation; False restores its defaults for a later run of this process.

    Each step needs as much memory as the last one freed; from the system it comes page by page, each filled with zeros.
    Thresholds that the user has set, as in mallopt(3), stay. Does nothing with another allocator.
    """
    global _keeps_memory
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in THRESHOLDS)
    if not is_set and is_wanted != _keeps_memory and (mallopt := getattr(LIBC, "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT if is_wanted else 2**17)
        mallopt(M_TRIM_THRESHOLD, -1 if is_wanted else 2**17)
        _keeps_memory = is_wanted


def give_memory_back() -> None:
    """Return free memory to the system: an evaluation may have needed more than a step does."""
    if _keeps_memory:
        LIBC.malloc_trim(0)  # type: ignore[union-attr]


def ignore(*numbers: int) -> None:
    """Ignore these signals from now on, also in programs that this process becomes by exec. Main thread only."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def start_detached(module: str, *arguments: str) -> None:
    """Run `python -m MODULE ARGUMENTS` in its own session, which outlives this process. Does nothing on OSError.

    It runs in the kit's parent folder, as the user's may have a package of the kit's name: pass absolute paths.
    """
    line = [sys.executable, "-m", module, *arguments]
    with contextlib.suppress(OSError):
        subprocess.Popen(line, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL, start_new_session=True)


@contextlib.contextmanager
def without_sigchld() -> Iterator[None]:
    """Suspend torch's SIGCHLD handler: when a loader worker dies, it raises in the middle of any line."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers run in the main thread alone
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables in the traceback of `error`: they hold the model, and with it the group's connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Watchdog:
    """A POSIX timer that kills this process, in state T, too, unless re-armed in time. Does nothing outside Linux.

    torchrun waits 30 s for a stopped process.

    Source: timer_create(2).
    """

    class _Event(ctypes.Structure):
        _fields_ = (
            ("value", ctypes.c_void_p),
            ("signo", ctypes.c_int),
            ("notify", ctypes.c_int),
            ("pad", ctypes.c_char * 48),
        )

    class _Spec(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        self._libc: ctypes.CDLL | None = None
        if sys.platform == "linux":
            event = self._Event(None, 9, 0, b"")  # SIGKILL, SIGEV_SIGNAL
            for library in (None, "librt.so.1"):  # its library before glibc 2.34
                with contextlib.suppress(AttributeError, OSError):
                    libc = ctypes.CDLL(library)
                    if libc.timer_create(1, ctypes.byref(event), ctypes.byref(self._timer)) == 0:  # CLOCK_MONOTONIC
                        self._libc = libc
                        return
            say("muster: this system has no timer_create: a stopped rank is detected, but only torchrun can end it")

    def delete(self) -> None:
        if self._libc:
            self._libc.timer_delete(self._timer)
            self._libc = None

    def wind(self, seconds: float) -> None:
        """Kill this process `seconds` from now, unless called again before; 0 stops the timer."""
        if self._libc:
            spec = self._Spec(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)
