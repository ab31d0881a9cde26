"""Turn SIGTERM into one point at which every rank stops.

The signal reaches ranks at different moments. A rank that stopped alone would leave the others waiting in a collective, and a
collective in every step to agree would slow down every run. So the ranks agree over the store:

1. A rank that gets the signal requests a stop.
2. Each rank's watcher sees the request, and posts how many phases of work (steps, evaluation batches) its rank has begun. From then
   on the rank begins none by itself.
3. The last rank to post announces the largest number. All ranks go on to it and stop there: what one has begun, all begin.

Before a request, a rank polls the store now and then; afterwards, it posts once and polls with growing pauses. Only the last rank's
single read of all numbers grows with the number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from muster.process import STOP_SIGNALS

if TYPE_CHECKING:
    from muster.world.group import World

POLL_S = 0.2
LONGEST_POLL_S = 5.0  # a sixth of a scheduler's usual grace period
POLLS_PER_S = 400.0  # total of all nodes: one rank of each asks for all
ANSWERS_PER_S = 1000.0  # total of all ranks, after a request
ANSWERED_S = 12.0
"""How long a paused rank waits for all to acknowledge a stop. If torchrun stops the ranks because one has died, they wait for it, too,
and are killed after 30 s: this leaves time to save."""


def poll_s(nodes: int) -> float:
    """Return the seconds between two polls of a node; bounds the store's load, and the delay."""
    return min(max(POLL_S / 2, nodes / POLLS_PER_S), LONGEST_POLL_S)


class Preemption:
    """This process's stop request. Call `install` as early as possible."""

    def __init__(self) -> None:
        self._is_requested = False
        self._has_arrived = False
        self._arrivals: tuple[int, int] | None = None

    @property
    def signalled(self) -> bool:
        """Whether the main thread knows of a stop request."""
        return self._is_requested

    def has_arrived(self) -> bool:
        """Whether one has reached this process, also while the main thread is in C and runs no handler."""
        if self._arrivals and not self._has_arrived:
            with contextlib.suppress(BlockingIOError):
                received = os.read(self._arrivals[0], 4096)
                ours = [number for number in STOP_SIGNALS if signal.getsignal(number) == self._on_signal]
                self._has_arrived = any(number in received for number in ours)
        return self._has_arrived or self._is_requested

    def request(self) -> None:
        """Stop all ranks at the next step."""
        self._is_requested = True

    def install(self) -> None:
        """Handle SIGTERM, Ctrl-C, and USR1 and USR2, which Slurm sends to every process of a step, loader workers included.

        A second SIGTERM changes nothing.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        self._note_arrivals()

    def uninstall(self) -> None:
        if self._arrivals:
            if (other := signal.set_wakeup_fd(-1)) != self._arrivals[1]:
                signal.set_wakeup_fd(other)
            for end in self._arrivals:
                os.close(end)
            self._arrivals = None

    def _note_arrivals(self) -> None:
        """Have signals written into a pipe on arrival, unless another library has Python's only wakeup fd."""
        if self._arrivals:
            return
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        if (other := signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)
            for end in ends:
                os.close(end)
            return
        self._arrivals = ends
        os.register_at_fork(after_in_child=self._forget_arrivals)

    def _forget_arrivals(self) -> None:
        """In a forked process: its signals are not this process's."""
        with contextlib.suppress(ValueError):  # forked by another thread than the main one
            self.uninstall()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signalled:  # a second Ctrl-C: the user does not want to wait
            raise KeyboardInterrupt
        self.request()


class Agreement:
    """The ranks' agreement on the step at which all stop. Watches for requests until it is closed.

    `is_reached` is True once `proceed` has returned False.
    """

    def __init__(self, world: World, preemption: Preemption):
        self._world, self._preemption = world, preemption
        self._change = threading.Condition()
        self._begun = 0
        self._target: int | None = None
        self._holding = False
        self._is_one_lost = self._is_one_silent = False
        self.is_reached = False
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if world.size > 1:
            self._watcher = threading.Thread(target=self._watch, name="preemption", daemon=True)
            self._watcher.start()

    def proceed(self) -> bool:
        """Whether to begin the next phase of work with a collective in it; False: stop here.

        Collective: every rank calls it in the same order, and all get False at the same point.

        Raises DistBackendError: a rank has died and is restarted in place for the next attempt, or does not answer a request to stop.
        """
        with self._change:
            if self._world.size == 1 and self._preemption.signalled and self._target is None:
                self._target = self._begun
            while True:
                if self._is_one_lost:
                    raise _lost("a rank has died")
                if self._is_one_silent:
                    raise _lost(f"a rank has not answered a request to stop within {ANSWERED_S:g} s")
                if self._target is not None and self._begun >= self._target:
                    self.is_reached = True
                    return False
                if self._target is not None or not self._holding:
                    self._begun += 1
                    return True
                self._change.wait()

    def close(self) -> None:
        self._ended.set()
        with self._change:  # no target will come for a thread that waits for it
            self._target = self._begun if self._target is None else self._target
            self._change.notify_all()
        if self._watcher:
            self._watcher.join(timeout=5)

    def _watch(self) -> None:
        # If the store is gone, so is the group: the main thread learns of it in its next collective.
        with contextlib.suppress(RuntimeError):
            if not self._await_request():
                return
            with self._change:
                self._holding = True
                mine = self._begun
            self._world.store_keys.post_begun(mine)
            if not self._await_target():
                with self._change:
                    self._is_one_silent = True
                    self._change.notify_all()

    def _await_request(self) -> bool:
        """Return False if the run ends, or a rank is lost, before any rank requests a stop."""
        store_keys, every_s = self._world.store_keys, poll_s(self._world.environment.nodes)
        while not self._ended.wait(POLL_S):
            if self._preemption.has_arrived():
                store_keys.ask_to_stop()
                return True
            if store_keys.asked_to_stop(every_s=every_s):
                return True
            if self._see_loss(every_s=every_s):
                return False
        return False

    def _see_loss(self, *, every_s: float = 0.0) -> bool:
        """Whether a rank has died and is restarted in place."""
        if not self._world.store_keys.is_one_lost(every_s=every_s):
            return False
        with self._change:
            self._is_one_lost = True
            self._change.notify_all()
        return True

    def _await_target(self) -> bool:
        """Return False if a rank has not answered for `ANSWERED_S` plus the time between its polls."""
        store_keys, pause_s = self._world.store_keys, POLL_S / 10
        deadline = time.monotonic() + ANSWERED_S + min(self._world.size / ANSWERS_PER_S, LONGEST_POLL_S)
        while not self._ended.wait(pause_s):
            if time.monotonic() > deadline:
                return False
            pause_s = min(2 * pause_s, max(POLL_S, self._world.size / ANSWERS_PER_S))
            if (target := store_keys.stop_target()) is not None:
                with self._change:
                    self._target = target
                    self._change.notify_all()
                return True
            if self._see_loss():
                return True
        return True


def _lost(why: str) -> Exception:
    from torch.distributed import DistBackendError  # imported here: signals are handled before torch is imported

    return DistBackendError(why)
