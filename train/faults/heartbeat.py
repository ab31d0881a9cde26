"""Finds a rank that hangs, names it and ends it within `dist.timeout_s`.

In a collective all ranks wait for the last one, so when one hangs all stand still, and the collective's own timeout
tells none from the other. Here each rank posts to the store which phase it is in (phase.py), and rank 0, which alone
reads all of them, posts with its own what it makes of them (verdict.py). A rank that has stood still for longer than
its phase allows reads rank 0's: the ranks that hang say where their code stands and leave, the others leave after
them, and the launcher restarts all. If rank 0 posts nothing new, it is rank 0 that is lost. A process that is stopped
is ended by its watchdog (watchdog.py), which has to be wound up.

A period costs the store one operation a rank, two on a rank that stands still or is the first. It grows with the
number of ranks, so that the store has some thousand operations a second to do and not more.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from train.dist.place import store_is_agents
from train.errors import RankLost, say
from train.faults.phase import Phase, Phases, cuda_is_busy
from train.faults.survey import Echo, Eye, Survey
from train.faults.verdict import fault, silence
from train.faults.watchdog import Watchdog

if TYPE_CHECKING:
    from train.dist.world import World

BEAT_S = 0.1
BEATS_PER_S = 2000.0  # of all ranks together
GRACE_S = 2.0  # for the rank that hangs to say so itself
LAST_WORDS_S = 30.0
ABANDONED_S = 4.0  # longer than a rank that lives is silent


def period_s(size: int, timeout_s: float) -> float:
    """Seconds between two signs of life of a rank: as many as the store can bear, and several within the timeout."""
    return max(BEAT_S, min(size / BEATS_PER_S, timeout_s / 8))


class Heartbeat:
    """This rank's sign of life, and its eye on the others."""

    def __init__(self, world: World, *, timeout_s: float, start_s: float, on_hang: Callable[[RankLost], object]):
        self.world, self.timeout_s, self.on_hang = world, timeout_s, on_hang
        self.phases = Phases(timeout_s=timeout_s, start_s=start_s, device_is_busy=partial(cuda_is_busy, world.device))
        self.period_s = period_s(world.size, timeout_s)
        self.eye: Eye = (Survey if world.is_first else Echo)(world, self.period_s)
        self._beat = 0
        self._told = -1
        self._watching = threading.Event()
        self._watched_for_good = False
        self._store_is_gone = False
        self._ended = threading.Event()
        self._watchdog: Watchdog | None = None

    @property
    def gone(self) -> int:
        """How many ranks give no sign of life, as far as rank 0 knows."""
        return self.eye.gone

    def start(self) -> None:
        """Begin to beat. A launcher must be there that restarts what is ended."""
        self._watchdog = Watchdog()
        for work in (self._judge, self._exchange):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def enter(self, kind: str, step: int) -> None:
        """Enter a phase of work: `step`, `evaluation`, `save` or `finish`."""
        self.phases.enter(kind, step)

    def close(self) -> None:
        """Stop beating; what is left to do for this process must not take long."""
        self._ended.set()
        if self._watchdog:
            self._watchdog.wind(self.timeout_s + LAST_WORDS_S)

    def watch(self) -> None:
        """Look at the other ranks from now on, whatever this one does."""
        self._watched_for_good = True
        self._look()

    def silence(self, seconds: float, *, waited: str = "") -> RankLost | None:
        """Which ranks, or whether the store, have given no sign of life for `seconds`; needs as long a watch before."""
        seconds = max(seconds, 2 * self.period_s)
        told = f"gives no sign of life{waited}: killed, stopped or cut off"
        if self._store_is_gone or self.eye.unanswered_s > seconds:
            return self._store_lost(told)
        if self.eye.first_silent_s > seconds:
            return RankLost(f"{self.eye.first_name} {told}", rank=0, host=self.eye.first_host)
        return silence(self.eye.outlook, seconds, told=told, me=self.world.rank)

    @property
    def is_abandoned(self) -> bool:
        """On rank 0: whether it stands still, and waits for a rank or a store that gives no sign of life."""
        return self.phases.age_s > ABANDONED_S and self.silence(ABANDONED_S) is not None

    def _store_lost(self, told: str) -> RankLost:
        address = os.environ.get("MASTER_ADDR", "this host")
        if not store_is_agents() and not self.world.is_first:  # it is in rank 0's process
            host = self.eye.first_host or address
            return RankLost(f"rank 0 on {host} {told}", rank=0, host=host)
        me = f"rank {self.world.rank} on {socket.gethostname()}"
        return RankLost(f"the rendezvous store at {address} {told} from {me}")

    def _look(self) -> None:
        if not self._watching.is_set():
            self.eye.begin()
            self._watching.set()

    def _exchange(self) -> None:
        """Post and, while somebody wants to know, read. In a thread of its own: a cut-off store may block for ever."""
        try:
            while not self._ended.is_set():
                self._beat += 1
                mine = self.phases.now(self._beat)
                is_wanted = self._watching.is_set() or mine.age_s > self.timeout_s / 4
                if self.world.is_first or is_wanted:
                    self.eye.look(mine, is_wanted=is_wanted)
                self.world.board.post_beat(self.eye.post(mine))
                self._ended.wait(self.period_s)
        except RuntimeError:
            self._store_is_gone = True

    def _judge(self) -> None:
        """Wind up the watchdog; when this rank stands still for too long, find out whose fault it is."""
        assert self._watchdog
        while not self._ended.wait(BEAT_S):
            self._watchdog.wind(self.timeout_s)
            try:
                verdict = self._verdict()
            except Exception:  # a defect here must not end a healthy run, as a watchdog that is not wound would
                traceback.print_exc()
                self._ended.wait(self.timeout_s / 2)
                continue
            if verdict and not self._ended.is_set():
                self._watchdog.wind(self.timeout_s + LAST_WORDS_S)
                self.on_hang(verdict)
                return

    def _verdict(self) -> RankLost | None:
        """Why this rank has to leave; None if all is well or has to be waited for."""
        mine = self.phases.now(self._beat)
        if mine.age_s < self.timeout_s / 2:
            if not self._watched_for_good:
                self._watching.clear()
            return None
        self._look()
        if mine.age_s < self.timeout_s - BEAT_S:
            return None
        waited = f" while rank {self.world.rank} waited for dist.timeout_s={self.timeout_s:g}"
        found = self.silence(self.timeout_s / 2 - 3 * self.period_s, waited=waited)
        if not found and mine.age_s >= mine.limit_s - BEAT_S:
            found = self._fault(mine)
        if not found and self.world.is_first and mine.number != self._told:
            self._told = mine.number
            self._tell(mine)
        return found

    def _fault(self, mine: Phase) -> RankLost | None:
        seen = self.eye.outlook
        found = fault(seen, mine, timeout_s=self.timeout_s, patient=mine.age_s < mine.limit_s + GRACE_S)
        if found and seen and seen.is_behind(mine):
            traceback.print_stack(sys._current_frames().get(threading.main_thread().ident or 0))
        return found

    def _tell(self, mine: Phase) -> None:
        """No hang yet, but nobody shall have to look at a silent terminal."""
        seen = self.eye.outlook
        for one in seen.behind[:1] if seen else ():
            say(
                f"muster: waiting for {mine.age_s:.0f} s so far: {one.name} stands in {one.where}, and may for {one.limit_s:.0f} s"
            )
