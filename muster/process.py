"""The current process: its processors, its death with its parent, the signals that it ignores, and processes that outlive it."""

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
from pathlib import Path
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**25
"""The highest threshold in bytes that glibc takes for blocks in mappings of their own (DEFAULT_MMAP_THRESHOLD_MAX of its malloc)."""
THRESHOLDS = "trim_threshold", "mmap_threshold"
_keeps_memory = False
WORKER_WAIT = "MP_STATUS_CHECK_INTERVAL"
"""torch's name for the longest wait for a DataLoader's worker; then it is ended."""
WORKER_LEAVES_S = 0.1
END_S, LEFT_S = 60.0, 5.0
"""The longest that what programs leave to their end may take; and unless all is done, when others may wait for this process."""
IO_BASE: Any = io.IOBase.__base__
"""What all files derive from; `isinstance` would ask objects for their `__class__`, which some warn of."""
_launcher: int | None = None
_is_first = True
_is_supervisor = False
_witness: list[None] = []
"""Younger than what `freeze` has frozen: when a script freezes, too, this is frozen with what the script had opened."""
_frozen_files: list[weakref.ref[Any]] = []
"""The files that were open when `freeze` was called."""


def end(code: int) -> NoReturn:
    """End this process with `code`, and before that, as the interpreter does, what programs leave to its end.

    Other threads are joined, functions of `atexit` called, open files flushed. The interpreter's tear-down is left out: it
    restores SIGTERM's default action, so that the launcher's signal would hide the code, and threads of C++ may abort the process
    in it. In a supervisor nothing of this is done: its children have done it. On another thread than the main one, only files are
    flushed. After END_S seconds, or LEFT_S with another code than 0, this process ends in any case.
    """
    try:
        if not _is_supervisor:
            threading.Thread(target=_end_late, args=(code, LEFT_S if code else END_S), daemon=True).start()
            if threading.current_thread() is threading.main_thread():
                threading._shutdown()  # type: ignore[attr-defined]  # in this order, as in Py_FinalizeEx
                _end_deaf_children()
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


def _end_deaf_children() -> None:
    """End daemonic children that ignore SIGTERM, as loader workers do: multiprocessing sends it, and waits for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker has ended
    for each in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{each.pid}/status").read_text(encoding="utf-8")
            ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
            if each.daemon and ignored >> (signal.SIGTERM - 1) & 1:
                each.kill()


def flush_files() -> None:
    """Write out what open files of this process hold back."""
    for each in [*(there() for there in _frozen_files), *_files()]:
        with contextlib.suppress(Exception):
            if not each.closed:
                each.flush()


def freeze() -> None:
    """Leave what there is out of all collections of garbage: in a forked process they would copy it. Open files are still flushed."""
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
    """Collect garbage, in which a DataLoader's workers may be: they are ended, and not waited for.

    A queue in the garbage has closed before the word to leave is put into it. torch waits 5 s for each worker to get it.
    """
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
    """Return the number of ranks that the launcher has started on this host; 1 without one."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdigit() and int(number) else 1


def worker_pid() -> int:
    """Return the pid of the process that the launcher started: this one, or its supervisor."""
    return os.getpid() if _launcher is None else os.getppid()


def is_supervised() -> bool:
    """Return whether this process is the child of a supervisor."""
    return _launcher is not None


def become_supervisor() -> None:
    """Take notice that this process has a child that does its work."""
    global _is_supervisor
    _is_supervisor = True


def become_supervised(launcher: int, *, is_first: bool) -> None:
    """Take notice that this process is a child of a supervisor, which `launcher` started; `is_first`: its first one."""
    global _launcher, _is_first, _is_supervisor
    _launcher, _is_first, _is_supervisor = launcher, is_first, False


def beginning_pid() -> int:
    """Return the pid of the process whose start began this one's work: a supervisor has done the imports of its first child."""
    return worker_pid() if _is_first else os.getpid()


def command_line() -> list[str]:
    """Return the words that started this process's job, as far as they can be seen: the launcher's of a rank, else its own.

    Empty if they do not start it again: the agent of `muster.launch` is started by a program of the user's.
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
    """Return the numbers of the processors that this process may use; all of the machine's, where no call says (macOS)."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def handle_of(pid: int) -> int:
    """Return a file descriptor that is readable when process `pid` has ended (pidfd_open(2)). Raises OSError.

    Linux 5.3 or newer; a container may forbid it.
    """
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def die_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Make the kernel send signal `number` to this process when its parent dies, however it dies. Linux only.

    The parent is the thread that started this process. See PR_SET_PDEATHSIG in prctl(2).

    Args:
        number: the signal.
        parent: the parent's pid, if known; if it has died already, this process sends itself the signal.
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
    """Have glibc keep the memory that is freed for the next allocation, or, in a later run of this process, no longer.

    A step frees what it has computed, and the next one needs as much: given back to the system at once, it comes again page by page, each
    filled with zeros. So a process keeps the most that it has needed since it last gave memory back. The user's own thresholds, as in
    mallopt(3), stay. Does nothing with another allocator.
    """
    global _keeps_memory
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in THRESHOLDS)
    if not is_set and is_wanted != _keeps_memory and (mallopt := getattr(LIBC, "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT if is_wanted else 2**17)
        mallopt(M_TRIM_THRESHOLD, -1 if is_wanted else 2**17)
        _keeps_memory = is_wanted


def give_memory_back() -> None:
    """Give the memory back that is free now: an evaluation may have needed more than a step does."""
    if _keeps_memory:
        LIBC.malloc_trim(0)  # type: ignore[union-attr]


def ignore(*numbers: int) -> None:
    """Ignore these signals from now on, also in programs that this process becomes by exec. Main thread only."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def start_detached(module: str, *arguments: str) -> None:
    """Run `python -m MODULE ARGUMENTS` in a session of its own, which outlives this process. Does nothing on OSError.

    Paths in `arguments` must be absolute: the process works in the kit's parent folder, because the user's folder may
    have a package with the kit's name.
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
    """Drop the local variables of the frames that `error` has left: the model, and with it the group's connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
