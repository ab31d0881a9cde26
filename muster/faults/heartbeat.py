"""Find a rank that hangs, name it and end it within `dist.timeout_s`.

When one rank hangs in a collective, all wait, and the collective's own timeout cannot tell which one hangs. So each rank posts
its phase (phase.py) to the store. Rank 0 alone reads all, and posts its assessment (rank_at_fault.py) with its own phase. A rank
that stands still for longer than its phase allows reads that post: the ranks that hang print where their code stands and leave,
the others leave after them, and the launcher restarts all. If rank 0 posts nothing new, rank 0 is lost. A stopped process is
ended by its watchdog timer, which must be re-armed regularly.

A failed rank tells the others, and a launcher sends SIGTERM. A main thread that waits in C, as on NCCL, hears neither, and
torchrun kills it 30 s later. So a rank whose main thread stands still leaves a few seconds after the store says
that another one has failed, or if another one is silent after a SIGTERM. So does one that sleeps in a collective after the
store says that another one was restarted in place: gloo does not tell the thread that waits for a message of which a part was on
its way (Pair::signalException in gloo/transport/tcp/pair.cc leaves out the one being read, and those being written). Such ranks leave
one after the other, as the end of one tells those that wait for it. On a GPU neither may come: with a static rendezvous, the
other nodes' launchers go on, and the store ends with its node. There it also leaves if the store is gone, or another rank is
silent for longer.

Each period costs the store two operations per node: one rank posts for all (world/node_memory.py), rank 0 reads. A rank that stands
still costs one more, and two others while its main thread does. The period grows with the number of nodes, which bounds the load to a
few hundred operations per second while all is well.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from muster.clock import SYSTEM, SystemClock
from muster.errors import MusterError, RankLost, say, traceback_of
from muster.faults.heartbeat_summary import Echo, Eye, Survey
from muster.faults.phase import Phase, Phases, Stillness, code_position, cuda_is_busy, main_thread_sleeps
from muster.faults.rank_at_fault import fault, left_out, silence
from muster.process import Watchdog, is_supervised
from muster.world.environment import Environment, store_is_agents

if TYPE_CHECKING:
    from muster.world.group import World

BEAT_S = 0.1
BEATS_PER_S = 275.0  # total of all nodes: each is posted once and read once
GRACE_S = 2.0  # time for the hanging rank to report itself
LAST_WORDS_S = 30.0
ABANDONED_S = 4.0  # longer than any live rank is silent
FREED_S = 10.0
"""Deadline for a rank to get an error that waited for one that was ended and is restarted in place; else it is ended, too."""
JOIN_S = 5.0
EMERGENCY = "emergency"
"""Phase of a rank that, after a loss, saves its last step or waits for another one to (recovery/emergency_checkpoint.py)."""
DESERTED_S = 8.0
"""Longer than ranks that know of a loss wait for a replacement and save; then those that wait for them hear of it."""
HEARD_S = 3.0
"""So long after a failure the rank has gone, and except on NCCL, those that wait for it have got an error."""
FORSAKEN_S = 15.0
"""Silence on a GPU without a SIGTERM: this, or `dist.timeout_s` / 4 if longer. A host that is moved is silent as well."""
BLIND_S = 2.0
"""A process that has not looked for so long was stopped itself, or its host, and does not know who was silent meanwhile."""
STILL_S = 2.0  # longer than a main thread that can leave by itself stands still once another rank has failed


def period_s(environment: Environment, timeout_s: float) -> float:
    """Return the heartbeat period: as short as the store's load allows, and several periods within the timeout."""
    most_s = timeout_s / (
        8 if environment.local_world_size == 1 else 16
    )  # a node's post comes on top: `StoreKeys.beat_lag`
    return max(BEAT_S, min(environment.nodes / BEATS_PER_S, most_s))


class Untold(RankLost):
    """This rank was not told that another one has died. It has no fault, and is restarted in place, too."""

    def __init__(self, me: int):
        text = f"another rank was restarted in place, and rank {me} was not told, which waits in {code_position()[0]}"
        super().__init__(text, rank=me, host=socket.gethostname())


class Heartbeat:
    """This rank's heartbeat, and its view of the other ranks.

    `on_hang`: called from a thread with the reason why this rank must leave.
    `is_asked_to_stop`: whether a stop signal has reached this process, even if the main thread does not know.
    """

    def __init__(
        self,
        world: World,
        *,
        timeout_s: float,
        start_s: float,
        on_hang: Callable[[MusterError], object],
        is_asked_to_stop: Callable[[], bool] = lambda: False,
        stillness: Stillness | None = None,
        clock: SystemClock = SYSTEM,
    ):
        self.world, self.timeout_s, self.on_hang, self.clock = world, timeout_s, on_hang, clock
        self.is_asked_to_stop, self.stillness = is_asked_to_stop, stillness or Stillness(clock=clock)
        is_busy = partial(cuda_is_busy, world.device)
        calls = world.calls.total
        self.phases = Phases(timeout_s=timeout_s, start_s=start_s, device_is_busy=is_busy, calls=calls, clock=clock)
        self.period_s = period_s(world.environment, timeout_s)
        self.eye: Eye = (Survey if world.is_first else Echo)(world, self.period_s, clock=clock)
        self._beat = 0
        self._told = -1
        self._watching = threading.Event()
        self._watched_for_good = False
        self._store_is_gone = False
        self._is_still = False
        self._one_has_failed = self._one_is_lost = False
        self._failed_at = self._told_at = self._cpu_s = 0.0
        self._turn = 0
        self._gone_at = 0.0
        self._has_erred = False
        self._judged_at = 0.0
        self._ended = threading.Event()
        self._watchdog: Watchdog | None = None
        self._threads: list[threading.Thread] = []

    @property
    def gone(self) -> int:
        """The number of ranks without a heartbeat, as far as rank 0 knows."""
        return self.eye.gone

    def start(self) -> None:
        """Start the heartbeat. The launcher must restart processes that it ends."""
        self._watchdog = Watchdog()
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True) for work in (self._judge, self._exchange)
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, kind: str, step: int) -> None:
        self.phases.enter(kind, step)

    def close(self) -> None:
        """Stop the heartbeat; the rest of this process must not take long."""
        self._ended.set()
        if self._watchdog:
            self._watchdog.wind(self.timeout_s + LAST_WORDS_S)

    def join(self) -> None:
        """After `close`: wait for the threads, while the store answers.

        Python ends a thread that returns from C++ (the store) during the interpreter's end, and C++ then aborts the process.
        """
        for thread in self._threads:
            thread.join(JOIN_S)

    def disarm(self) -> None:
        """After `close`: let this process live on."""
        if self._watchdog:
            self._watchdog.wind(0.0)

    def release(self) -> None:
        """After `close`: delete the watchdog, in a process that will have another one."""
        if self._watchdog:
            self._watchdog.delete()

    def watch(self) -> None:
        """Watch the other ranks also while this rank makes progress."""
        self._watched_for_good = True
        self._look()

    def waited_for(self) -> str:
        """Return where other ranks have waited for this one, at its end, for half of the timeout, in a step that it has left or a later one.

        Empty if they have not.
        """
        mine, seen = self.phases.now(self._beat), self.eye.outlook
        if seen is None or not seen.behind or seen.all_behind or mine.age_s <= self.timeout_s / 2:
            return ""
        if seen.is_behind(mine):
            return "other ranks wait"
        first = seen.behind[0]
        return f"{first.name} waits in {first.where}" if seen.waiting and seen.still_s > self.timeout_s / 2 else ""

    def silence(self, seconds: float, *, waited: str = "") -> RankLost | None:
        """Return a RankLost that names the ranks without a heartbeat for `seconds`, or the store; else None.

        This rank must have watched the others for at least that long.
        """
        seconds = max(seconds, self.world.store_keys.beat_lag * self.period_s)
        cause = f"{waited}: killed, stopped or disconnected"
        if self._store_is_gone or self.eye.unanswered_s > seconds:
            return self._store_lost(cause)
        if self.eye.first_silent_s > seconds:
            return RankLost(f"{self.eye.first_name} sends no heartbeat{cause}", rank=0, host=self.eye.first_host)
        return silence(self.eye.outlook, seconds, symptom=f"sends no heartbeat{cause}", me=self.world.rank)

    @property
    def is_abandoned(self) -> bool:
        """On rank 0: it stands still, and a rank or the store does not answer."""
        return self.phases.age_s > ABANDONED_S and self.silence(ABANDONED_S) is not None

    def _store_lost(self, cause: str) -> RankLost:
        address = os.environ.get("MASTER_ADDR", "this host")
        if store_is_agents() or self.world.is_first:
            me = f"rank {self.world.rank} on {socket.gethostname()}"
            return RankLost(f"the rendezvous store at {address} does not answer {me}{cause}")
        host = self.eye.first_host or address
        # the store is in rank 0's process, or else in a child of its supervisor
        lost = (
            f"rank 0's rendezvous store on {host} does not answer"
            if is_supervised()
            else f"rank 0 on {host} sends no heartbeat"
        )
        return RankLost(f"{lost}{cause}", rank=0, host=host)

    def _look(self) -> None:
        if not self._watching.is_set():
            self.eye.begin()
            self._watching.set()

    def _exchange(self) -> None:
        """Beat until the end, in its own thread: a store that is cut off may block forever.

        Another error, such as a device's, is the main thread's to report: the others still hear from this rank.
        """
        from torch.distributed import DistError  # here, so that this module imports no torch

        while not self._ended.is_set():
            try:
                self.beat()
            except DistError:
                self._store_is_gone = True
                return
            except Exception as error:
                if not self._has_erred:
                    say(traceback_of(error))
                self._has_erred = True
            self.clock.wait(self._ended, self.period_s)

    def beat(self) -> None:
        """Post one beat; while watching, read the others'."""
        self._beat += 1
        mine = self.phases.now(self._beat)
        is_wanted = self._watching.is_set() or mine.age_s > self.timeout_s / 4
        if self.world.is_first or is_wanted:
            self.eye.look(mine, is_wanted=is_wanted)
        store_keys = self.world.store_keys
        self._one_has_failed = self._is_still and store_keys.has_failure()
        self._one_is_lost = self._is_still and store_keys.is_one_lost(every_s=self.period_s)
        if self._one_is_lost and not self._turn and self._untold_s > HEARD_S:
            self._turn = store_keys.take_turn()
        store_keys.post_beat(self.eye.post(mine), every_s=self.period_s)

    def _judge(self) -> None:
        """Re-arm the watchdog; when this rank stands still for too long, find the rank at fault."""
        assert self._watchdog
        while not self.clock.wait(self._ended, BEAT_S):
            self._watchdog.wind(self.timeout_s)
            try:
                verdict = self._verdict()
            except (
                Exception
            ) as error:  # a bug here must not end a healthy run, as a watchdog that is not re-armed would
                say(traceback_of(error))
                self.clock.wait(self._ended, self.timeout_s / 2)
                continue
            if verdict and not self._ended.is_set():
                self._watchdog.wind(self.timeout_s + LAST_WORDS_S)
                self.on_hang(verdict)
                if not self._ended.is_set():
                    self._watchdog.wind(FREED_S)
                return

    def _verdict(self) -> MusterError | None:
        """Return why this rank must leave; None if all is well or the rank must wait."""
        mine = self.phases.now(self._beat)
        if found := self._deserted(mine):
            return found
        if mine.age_s < self.timeout_s / 2:
            if not self._watched_for_good and not self._is_still:
                self._watching.clear()
            return None
        self._look()
        if skipped := left_out(self.eye.outlook, mine):
            return skipped
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

    def _deserted(self, mine: Phase) -> RankLost | None:
        """Return why this rank must leave although its main thread stands still and has not heard of it."""
        still_s = self.phases.still_s = self.stillness.seconds(mine.number)
        self._is_still = still_s >= STILL_S and mine.label.split()[0] != EMERGENCY
        if not self._is_still:
            return None
        if not self._one_has_failed:
            self._failed_at = self.clock.monotonic()
        elif self.clock.monotonic() - self._failed_at > HEARD_S:
            return RankLost(f"another rank has failed, while rank {self.world.rank} waited in {code_position()[0]}")
        if not self._is_untold():
            self._told_at = self.clock.monotonic()
        elif self._turn and self._untold_s > self._turn * HEARD_S:
            return Untold(self.world.rank)
        if self.is_asked_to_stop():
            self.watch()
            return self.silence(DESERTED_S, waited=f", and rank {self.world.rank} is asked to stop")
        return self._forsaken() if self.world.device.type == "cuda" else None

    def _is_untold(self) -> bool:
        """Whether another rank was restarted in place, and this process sleeps in a collective: a backward pass computes as well."""
        if not (self._one_is_lost and code_position()[1] and main_thread_sleeps()):
            return False
        before, self._cpu_s = self._cpu_s, time.process_time()
        return self._cpu_s - before < BEAT_S / 4

    @property
    def _untold_s(self) -> float:
        return self.clock.monotonic() - self._told_at

    def _forsaken(self) -> RankLost | None:
        """The same on a GPU: nothing else may tell the rank that the others are gone."""
        self._look()
        now, before = self.clock.monotonic(), self._judged_at
        self._judged_at = now
        if now - before > BLIND_S:
            self.eye.begin()
            return None
        if not self._store_is_gone:
            self._gone_at = now
        elif now - self._gone_at <= HEARD_S:
            return None
        waited = f", while rank {self.world.rank} waited in {code_position()[0]}"
        return self.silence(max(FORSAKEN_S, self.timeout_s / 4), waited=waited)

    def _fault(self, mine: Phase) -> RankLost | None:
        seen = self.eye.outlook
        found = fault(seen, mine, timeout_s=self.timeout_s, patient=mine.age_s < mine.limit_s + GRACE_S)
        if found and seen and seen.is_behind(mine):
            traceback.print_stack(sys._current_frames().get(threading.main_thread().ident or 0))
        return found

    def _tell(self, mine: Phase) -> None:
        """Print which rank is waited for before it is a hang, so that the terminal is not silent."""
        seen = self.eye.outlook
        for one in seen.behind[:1] if seen else ():
            say(
                f"muster: waiting for {mine.age_s:.0f} s so far: {one.name} is in {one.where}, which may take {one.limit_s:.0f} s"
            )
