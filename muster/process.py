"""The current process: its processors, its death with its parent, the signals that it ignores, and processes that outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec
WORKER_WAIT = "MP_STATUS_CHECK_INTERVAL"
"""torch's name for the longest wait for a DataLoader's worker; then it is ended."""
WORKER_LEAVES_S = 0.1
_launcher: int | None = None
_is_first = True


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
    """Return the pid of the process that started this rank: its parent, or its keeper's (faults/keeper.py)."""
    return os.getppid() if _launcher is None else _launcher


def ranks_on_host() -> int:
    """Return the number of ranks that the launcher has started on this host; 1 without one."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdigit() and int(number) else 1


def worker_pid() -> int:
    """Return the pid of the process that the launcher started: this one, or its keeper."""
    return os.getpid() if _launcher is None else os.getppid()


def is_kept() -> bool:
    """Return whether this process is the child of a keeper."""
    return _launcher is not None


def become_kept(launcher: int, *, is_first: bool) -> None:
    """Take notice that this process is a child of a keeper, which `launcher` started; `is_first`: its first one."""
    global _launcher, _is_first
    _launcher, _is_first = launcher, is_first


def beginning_pid() -> int:
    """Return the pid of the process whose start began this one's work: a keeper has done the imports of its first child."""
    return worker_pid() if _is_first else os.getpid()


def command_line() -> list[str]:
    """Return the words that started this process's job, as far as they can be seen: the launcher's of a rank, else its own.

    Empty if they do not start it again: the agent of `muster.launch` is started by a program of the user's.
    """
    words = list(sys.orig_argv)
    if "RANK" in os.environ:
        try:
            words = Path(f"/proc/{launcher_pid()}/cmdline").read_text().rstrip("\0").split("\0")
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
