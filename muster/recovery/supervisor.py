"""The supervisor of a rank: torchrun's worker, whose child is the rank. A rank that dies by a signal is restarted in place.

A supervisor has the imports behind it and holds nothing else, so a new rank is there in some 40 ms, and torchrun sees no
failure. It only waits for the rank's end, so it notices it at once. What a rank imports later, each new one imports again.
A supervisor forks, so it has no threads: it may run no parallel operation of torch, and touch no GPU.
The rank dies with its supervisor, the supervisor with torchrun's agent. Signals are passed on, and so is the exit code.

A rank is not restarted in place if it ends by itself, if it had not met the others, if it dies twice at one step, or if it has
been restarted `most_per_hour` times within an hour: then its supervisor ends as it did, and torchrun restarts all ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from muster import process
from muster.errors import ConfigError, say
from muster.faults.preemption import Preemption
from muster.recovery.journal import StepJournal
from muster.world.rendezvous import port

DEADLY = {
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
}
"""Signals after which a rank is restarted in place."""
ENDED_S = 0.5
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Incarnation:
    """One process of a rank: its number, from 0, how and when (monotonic clock) the last one ended, and where earlier ones hung.

    silent_s: seconds from the last step of the last one to its end.
    """

    number: int
    journal: StepJournal
    died_of: str = ""
    died_at: float = 0.0
    silent_s: float = 0.0
    hangs: tuple[str, ...] = ()
    """Within the last day, once for each time."""

    @property
    def is_first(self) -> bool:
        return self.number == 0


def supervise(
    journal: StepJournal,
    *,
    preemption: Preemption,
    most_per_hour: int,
    store: Callable[[], None] | None = None,
) -> Incarnation | int:
    """Fork the rank, and fork it again if it dies by a signal. Return the incarnation in a child; here, the exit code of the last one.

    If the last child has died by a signal, this process dies by the same one.

    preemption: a child begins with this process's stop request, if there is one.
    store: hosts the rendezvous store, in a child of its own, if it has to outlive the rank.
    """
    restarts, died_of, died_at, died_in = deque[float](maxlen=max(1, most_per_hour)), "", 0.0, -2
    silent_s = 0.0
    launcher, supervisor, number, ended, hung = os.getppid(), os.getpid(), 0, 0, list[tuple[str, float]]()
    if store:
        _start(store, supervisor)
        port.give_away()
    process.freeze()
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        with _held_back():
            try:
                child = os.fork()
            except OSError as error:
                if number:
                    say(
                        f"muster: rank {os.environ.get('RANK')} cannot be restarted in place: {error}: all ranks restart"
                    )
                    _die(-ended)
                raise
            if not child:
                _become(supervisor, launcher, preemption, is_first=not number)
                hangs = tuple(place for place, at in hung if died_at - at < DAY_S)
                return Incarnation(number, journal, died_of, died_at, silent_s, hangs)
            process.become_supervisor()
            _pass_on(child, preemption)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended >= 0:
            preemption.install()
            return ended
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # what the rank has started and is not gone, as loader workers
        died_of, died_at, step = signal.Signals(-ended).name, time.monotonic(), journal.whole
        silent_s = journal.silent_s
        if hang := journal.hang:
            died_of, journal.hang = f"hang in {hang}", ""
            hung.append((hang, died_at))
        is_again = died_in == step and not journal.is_over  # a lower one: all ranks went back to a checkpoint
        if is_again:
            say(f"muster: rank {os.environ.get('RANK')} has died twice at one step, {step + 1}: all ranks restart")
        if -ended not in DEADLY or is_again or journal.is_over or not journal.launch or why_no_fork():
            _die(-ended)
        if not most_per_hour or (len(restarts) == most_per_hour and died_at - restarts[0] < HOUR_S):
            say(
                f"muster: rank {os.environ.get('RANK')} has died {len(restarts) + 1} times within an hour "
                f"(max_survivals_per_hour={most_per_hour}): all ranks restart; see what kills it on this host"
            )
            _die(-ended)
        restarts.append(died_at)
        died_in, number = step, number + 1


def journal_for(why_not: Callable[[], str | None], *, last: int = 2) -> StepJournal | str:
    """Return memory for the journal of a rank that is restarted in place if it dies; why not, if it is not.

    why_not: returns that, empty if nothing is in the way, or None if nobody has asked for it. last: see `StepJournal`.
    """
    try:
        why = why_not()
        return "" if why is None else why or why_no_fork() or StepJournal(last=last)
    except OSError:
        return "the system gives no memory for its journal"
    except ConfigError:  # which the attempt reports
        return ""


def _start(store: Callable[[], None], supervisor: int) -> None:
    with _held_back():
        if os.fork():
            return
        os.setpgid(0, 0)
        process.ignore(*process.STOP_SIGNALS)
        process.die_with_parent(parent=supervisor)
    with contextlib.suppress(BaseException):
        store()
    os._exit(1)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Hold back stop requests until both sides of a fork have their handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(supervisor: int, launcher: int, preemption: Preemption, *, is_first: bool) -> None:
    """Make the forked process a rank, in a process group of its own: it gets each signal once, from its supervisor."""
    os.setpgid(0, 0)
    process.call_it(f"muster-rank{os.environ.get('RANK', '')}")
    process.become_supervised(launcher, is_first=is_first)
    process.die_with_parent(parent=supervisor)
    preemption.install()


def _pass_on(child: int, preemption: Preemption) -> None:
    def on_signal(number: int, _: FrameType | None) -> None:
        preemption.request()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in process.STOP_SIGNALS:
        signal.signal(number, on_signal)


def why_no_fork() -> str:
    """Return why this process must not fork (a thread, a process or a connection is open); else "".

    OpenBLAS, which `import numpy` starts if OMP_NUM_THREADS allows it, stops its threads before each fork: so a fork tells them
    from others.
    """
    _stop_monitor()
    if threading.active_count() > 1:
        return f"an imported module has started the thread {threading.enumerate()[-1].name}"
    if _threads() > 1:
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        ends = time.monotonic() + ENDED_S
        while _threads() > 1:  # the kernel may list one that has ended a little longer
            if time.monotonic() > ends:
                return "an imported module has started a thread"
            time.sleep(0.005)
    if multiprocessing.active_children():
        return "a process has been started"  # which only its parent can wait for
    return "an imported module has opened a connection" if _has_connection() else ""


def _stop_monitor() -> None:
    """End the threads by which tqdm refreshes slow bars: a later bar starts a new one."""
    for thread in threading.enumerate():
        if bar := getattr(thread, "tqdm_cls", None):
            thread.exit()  # type: ignore[attr-defined]
            bar.monitor = None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_connection() -> bool:
    """Return whether this process has a socket beside stdin, stdout, stderr and the store's port."""
    known = {0, 1, 2, *port.held()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) not in known and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return True
    return False


def _die(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(1)
