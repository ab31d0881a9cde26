"""SIGTERM, turned into one point at which every rank stops.

The signal reaches ranks at different moments, and a rank that stopped on its own would leave the others waiting in a
collective. A collective in every step to ask would cost a step of every run. So the ranks agree over the store, and
only once somebody asked:

1. whoever is signalled posts "stop";
2. on seeing it, every rank's watcher posts how many sections of work (steps, evaluation passes) its rank has begun,
   and from then on the rank begins no further one by itself;
3. all go on to the largest number posted, and stop there. Every section that any rank began is thereby begun by all.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.dist.world import World

POLL_S = 0.2


class Preemption:
    """Knows whether this run was told to stop. Install it as early as possible, watch once the world is there."""

    def __init__(self) -> None:
        self.signalled = False
        self._change = threading.Condition()

    def install(self) -> None:
        """Take SIGTERM, and Ctrl-C, from now on. A second SIGTERM changes nothing.

        Slurm sends a step's USR1 or USR2 to every process in it, workers included: they mean the same.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signalled:  # somebody at the keyboard does not want to wait
            raise KeyboardInterrupt
        self.signalled = True

    def watch(self, world: World) -> None:
        """Start to look for the other ranks' signals, at the start of a run."""
        self._world = world
        self._begun = 0
        self._target: int | None = None
        self._holding = False
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if world.size > 1:
            self._watcher = threading.Thread(target=self._watch, name="preemption", daemon=True)
            self._watcher.start()

    def proceed(self) -> bool:
        """Ask before every section of work with a collective in it: True to begin it, False to stop here.

        Every rank asks in the same order, and all get False at the same point.
        """
        with self._change:
            if self._world.size == 1 and self.signalled and self._target is None:
                self._target = self._begun
            while True:
                if self._target is not None and self._begun >= self._target:
                    return False
                if self._target is not None or not self._holding:
                    self._begun += 1
                    return True
                self._change.wait()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        with self._change:  # whoever waits for a target now waits in vain
            self._target = self._begun if self._target is None else self._target
            self._change.notify_all()
        if self._watcher:
            self._watcher.join(timeout=5)

    def _watch(self) -> None:
        store = self._world.store.clone()  # a client of its own: a blocking call on a shared one holds up the other
        rank, ranks = self._world.rank, range(self._world.size)
        announced = False
        # A store that is gone means that the group is gone: the main thread learns it from its own next collective.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(POLL_S if not self._holding else POLL_S / 10):
                if self.signalled and not announced:
                    store.set("stop", "1")
                    announced = True
                if not self._holding and store.check(["stop"]):
                    with self._change:
                        self._holding = True
                        mine = self._begun
                    store.set(f"stop/{rank}", str(mine))
                if self._holding and store.check([f"stop/{r}" for r in ranks]):
                    target = max(int(store.get(f"stop/{r}")) for r in ranks)
                    with self._change:
                        self._target = target
                        self._change.notify_all()
                    return
