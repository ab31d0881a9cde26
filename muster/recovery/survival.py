"""How a rank survives the death of another one, which is restarted in place (recovery/supervisor.py).

    A. Parameters, optimizer state, buffers and averages change only after a complete sum over the ranks.
    B. So survivors differ by at most one step. The state of the furthest rank is handed on; nothing is voted on per step.
    C. At a step, what a rank draws is a function of the seed, the step and the rank, and what only it knows of a step is
       in its journal (recovery/journal.py) before its part of the step's sum leaves it: a replacement needs nobody's generators.
    D. No rank of an attempt writes a file after the next attempt has begun: a process is started when the one before it is
       gone, and rank 0 commits under a claim that the next attempt takes.
    E. What a log line, an evaluation or a save of a step needs is part of the state that is handed on, and so are the last
       records: each step is in metrics.jsonl once, also if rank 0 dies between a step and its line.

The death of a rank ends the attempt of all. Survivors learn of it from the collective in which they stand, or from the
count of incarnations in the store, and meet the replacement in the next attempt, in their processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.errors import CrashLoop, RankLost
from muster.faults.heartbeat import Untold
from muster.faults.phase import code_position
from muster.process import handle_of
from muster.recovery.supervisor import Incarnation
from muster.world.environment import Environment
from muster.world.rendezvous import port
from muster.world.rendezvous.meeting import Membership
from muster.world.rendezvous.network import connect
from muster.world.store_client import Connections
from muster.world.store_keys import Incarnations, StoreKeys

if TYPE_CHECKING:
    from muster.world.group import World

HANGS_AGAIN = (
    "rank {rank} on {host} hangs for the third time within a day in {place}, after the update of a step, in a collective: call it on all ranks, "
    "or on none; if all do, the network loses data; then run the same command again"
)
UNTOLD = " after another rank's death"
HANGS = 2
"""The hangs at one place after which the next one ends the run."""
REPLACEMENT_S = 2.5
"""The longest wait for a replacement after an error that may come from a death. Without one, all ranks restart."""
WHY_NOT = "a rank that dies ends all ranks ({key} does not apply: {why})"
"""The note of a run that does not survive the death of a rank, although the setting `key` asks for it."""
POLL_S = 0.005
REPLACED_S = 2.0
SILENT_S = 0.5


class Survival:
    """The survival of one rank, in one process of it."""

    def __init__(self, incarnation: Incarnation):
        self.incarnation, self.journal = incarnation, incarnation.journal
        self.told = False
        """True once the death before this incarnation is recorded."""
        self.is_past_update: Callable[[], bool] | None = None
        """Returns whether the step is counted, and the loop still does what follows it."""
        self._is_off = False
        self._is_lost_for_good = False
        self._store_keys: StoreKeys | None = None
        self._connections: Connections | None = None

    @property
    def membership(self) -> Membership:
        """This process's incarnation, for the meeting with the other ranks."""
        return Membership(self.incarnation.number, self.journal.launch, self._connections)

    @property
    def is_again(self) -> bool:
        """True if the rank has met the others before, in this process or in an earlier one."""
        return bool(self.journal.launch)

    def announce(self, environment: Environment, *, timeout_s: float, stopping: Callable[[], bool]) -> None:
        """Tell the other ranks, which wait for it, that this one has died and is restarted in place.

        Raises MusterError: the rendezvous store does not answer, or `stopping` became true.
        """
        if self.incarnation.number and self._connections is None:
            self._connections = Connections(connect(environment, timeout_s=timeout_s, stopping=stopping))
            Incarnations(self._connections.first, self.journal.launch).announce()

    def meet(self, store_keys: StoreKeys) -> None:
        """Note that the ranks have met in the attempt of `store_keys`, and form their group."""
        self._store_keys, self._is_lost_for_good = store_keys, False

    def met(self, world: World) -> None:
        """Note that the group is formed: from now on this rank is restarted in place if it dies."""
        if incarnations := world.store_keys.incarnations:
            self.journal.launch, self._connections = incarnations.launch, world.store_keys.connections

    def end(self) -> None:
        """Note that the ranks are about to end together: from now on this rank is not restarted in place."""
        self.journal.end()

    def refuse(self) -> None:
        """Let the death of a rank restart all from now on. Every rank must call it."""
        self._is_off = True
        self.journal.end()

    def covers(self, error: BaseException, world: World | None) -> bool:
        """Return whether `error` comes from the death of a rank that is restarted in place. Waits up to `REPLACEMENT_S` for that.

        Also after a stop request: only together can the ranks save the step at which they stop.
        """
        store_keys = world.store_keys if world else self._store_keys
        if self._is_off or store_keys is None or not store_keys.incarnations or not is_of_peer(error):
            return False
        if not self._is_lost_for_good:  # each of the ways out of a loop asks
            self._is_lost_for_good = not _is_one_lost_within(REPLACEMENT_S, store_keys, or_failed=True)
        return not self._is_lost_for_good

    def replaces(self, error: RankLost, world: World, *, ends: Callable[[], bool]) -> bool:
        """Return whether a rank that hangs is restarted in place; if it is this one, end this process by SIGKILL for it.

        ends: returns False if the main thread is awake meanwhile, and ends or leaves the attempt itself.
        Raises CrashLoop: this rank hangs again at the same place, in a collective of the loop's own after the update. What the loop had
        still to do in that step is not done again, so the hang would return at each step.
        """
        if self._is_off or not world.store_keys.incarnations or error.rank is None:
            return False
        if error.rank == world.rank:
            place, is_waiting = code_position()
            if isinstance(error, Untold):
                place += UNTOLD
            elif (
                is_waiting
                and self.is_past_update
                and self.is_past_update()
                and self.incarnation.hangs.count(place) >= HANGS
            ):
                raise CrashLoop(HANGS_AGAIN.format(rank=world.rank, host=socket.gethostname(), place=place))
            if not ends():
                return True
            self.journal.hang = place
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return _is_one_lost_within(REPLACED_S, world.store_keys)


def _is_one_lost_within(seconds: float, store_keys: StoreKeys, *, or_failed: bool = False) -> bool:
    """Return whether a rank is restarted in place within `seconds`; the store may be silent, or gone.

    or_failed: stop waiting once a rank has posted why it leaves.
    """
    found: list[bool] = []

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            for number in range(int(seconds / POLL_S)):
                if store_keys.is_one_lost():
                    found.append(True)
                    return
                if or_failed and number % 10 == 9 and store_keys.first_failure(0.0):
                    return
                time.sleep(POLL_S)

    looking = threading.Thread(target=look, name="incarnations", daemon=True)
    looking.start()
    looking.join(seconds + SILENT_S)
    return bool(found)


def is_of_peer(error: BaseException) -> bool:
    """Return whether torch's `error` may mean that another rank is gone."""
    if isinstance(error, RankLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__module__ == "torch.distributed" or bool(re.search(r"\bgloo\b|NCCL|nccl", str(error)))


def why_no_survival() -> str:
    """Return why this launch's ranks cannot be restarted in place; empty if they can."""
    if sys.platform != "linux":
        return "it needs Linux"
    return why_no_child() if "TORCHELASTIC_RUN_ID" in os.environ else "ranks are not started by torchrun"


def why_none_survives(world: World, why: str) -> str:
    """Return why a rank's death ends all: a rank's own `why`, and which rank says so unless all do; empty if it does not. Collective."""
    told = world.gather(why)
    first = next(filter(None, told), "")
    return first if all(told) or not first else f"{first}, on rank {told.index(first)}"


def why_no_child() -> str:
    """Return why a child of this process cannot be a rank; empty if it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        os.close(handle_of(os.getpid()))
    except OSError as error:  # Linux before 5.3, or a container that forbids it
        return f"the system has no pidfd_open ({error.strerror})"
    return "" if port.hold() else "MASTER_PORT is in use by another process"
