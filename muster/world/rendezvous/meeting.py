"""Let the ranks of an attempt find each other over the rendezvous store, before a process group exists.

The meeting names a rank that is missing, failed early or was started with another config, so that no rank waits for it
in the first collective.

A store may outlive an attempt (torchrun keeps one across worker restarts), so it may still hold keys of dead processes.
Meetings are therefore numbered, and each process gets a number when it arrives in a meeting:

1. Rank 0 opens the next meeting and posts its facts. This ends the previous meeting for ranks that still wait in it.
2. The other ranks wait until the newest meeting is open, compare themselves with rank 0 and arrive. Each arrival gets a
   number that no other process ever has in this meeting.
3. Rank 0 reads the arrivals until it has one of each rank, and posts a single verdict with the largest number that it
   has read.
4. A rank accepts the verdict if rank 0 has read the rank's own arrival. If not, the rank was too late for a meeting of
   an earlier attempt, and goes on to the next meeting.

So no rank accepts a verdict about another process, only rank 0 polls, and each rank needs about ten operations.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError, HashStore, Store

from muster.errors import MusterError, of_code, say
from muster.world.environment import Environment, agents_compare_clocks, launcher
from muster.world.rendezvous.meeting_keys import Lobby
from muster.world.rendezvous.network import STOP_S, Abandoned, Stopped, Unheard, attend, connect
from muster.world.rendezvous.shared_file import SharedFile
from muster.world.store_client import Connections
from muster.world.store_keys import Incarnations

CLOCKS_APART_S = 2.0
LEAST_TICK_S, TICK_S = 0.002, 0.05
HEARD_S = 5.0
LATECOMERS_S = 5.0  # after a stop request rank 0 still waits for late ranks, so that they stop too
VERDICT_S = 5.0  # wait past the deadline for the verdict, which names the missing ranks


@dataclass(frozen=True)
class Met:
    """The result of a meeting: an attempt id that no other attempt has, and the store.

    On rank 0 `agents` holds the launchers of all ranks; on other ranks only the rank's own.
    """

    attempt: str
    store: Store
    agents: list[str]
    operations: Counter[str] = field(default_factory=Counter)
    shared: SharedFile | None = None
    connections: Connections | None = None
    incarnations: Incarnations | None = None
    """The replacements in this launch, if a rank that dies may be restarted in place."""
    again: bool = False
    """True if a rank has met others before, in this launch."""


def meet(
    environment: Environment,
    *,
    alike: Mapping[str, Any] | None,
    error: MusterError | None,
    timeout_s: float,
    device: str = "",
    stopping: Callable[[], bool] = lambda: False,
    membership: Membership | None = None,
) -> Met:
    """Find the other ranks, and check that all are present, alike and without error. Collective.

    `alike`: the flat values that all ranks must have in common; None compares none. `error`: keeps this rank from training; all
    ranks then end with it. `device`: the device type, which all ranks must have in common. `stopping` returns True after a stop
    request to this process; all ranks that have arrived then leave at once. `membership`: as for `group.start`.

    Raises MusterError: the early error of the lowest rank that has one. Raises ConfigError: ranks are missing or differ.
    Raises Stopped: a rank received a stop request. Raises RankLost: the store, or rank 0 which held it, is gone.
    """
    if environment.world_size == 1:
        if error:
            raise error
        return Met(uuid.uuid4().hex[:8], HashStore(), [launcher()])
    deadline = time.monotonic() + timeout_s
    shared = environment.shared_file and SharedFile(
        environment, environment.shared_file, timeout_s=timeout_s, stopping=stopping
    )
    if membership and membership.connections:
        connections = membership.connections
    else:
        connections = Connections(
            shared.open() if shared else connect(environment, timeout_s=timeout_s, stopping=stopping)
        )
    store = connections.first
    own = Own.of(environment, alike=alike, error=error, device=device, membership=membership)
    try:
        if environment.rank == 0:
            lobby = Lobby(store)
            verdict, agents = host(lobby, own, timeout_s=timeout_s, deadline=deadline, stopping=stopping)
        else:
            lobby = Lobby(connections.get("meeting"))
            waiting = Lobby(store, lobby.operations)
            verdict = attend_meeting(waiting, lobby, own, deadline=deadline, stopping=stopping)
            agents = [own.hello["agent"]]
        attempt, failed = verdict["attempt"], error_of(verdict)
    except DistError as broken:
        raise (Stopped() if stopping() else Abandoned(environment)) from broken
    if shared and (error or failed):
        shared.remove()
    elif shared:
        shared.met()
    if error and not (failed and failed[0] == Stopped.exit_code):
        raise error
    if failed:
        raise Stopped if failed[0] == Stopped.exit_code else of_code(*failed)
    launch, known = verdict["incarnations"] or ("", 0)
    incarnations = (
        Incarnations(connections.get("quick"), launch or attempt, known=known)
        if membership and verdict["incarnations"]
        else None
    )
    return Met(attempt, store, agents, lobby.operations, shared or None, connections, incarnations, again=bool(launch))


@dataclass(frozen=True)
class Membership:
    """Which process of its rank this is: the number of those before it, and the first attempt of its launch, if known.

    connections: its connections to the rendezvous store, from an earlier attempt.
    """

    number: int = 0
    launch: str = ""
    connections: Connections | None = None


@dataclass(frozen=True)
class Own:
    """The facts, hello and flat config that this process brings to a meeting."""

    environment: Environment
    facts: dict[str, Any]
    hello: dict[str, Any]
    config: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        environment: Environment,
        *,
        alike: Mapping[str, Any] | None,
        error: MusterError | None,
        device: str,
        membership: Membership | None = None,
    ) -> Own:
        facts = {
            "host": socket.gethostname(),
            "torch": torch.__version__,
            "code": code_hash(),
            "device": device,
            "config": digest(alike) if alike is not None else None,
        }
        failed = [error.exit_code, str(error)] if error else None
        hello = {"rank": environment.rank, "host": facts["host"], "agent": launcher(), "error": failed}
        if membership:
            hello["incarnation"] = [membership.number, membership.launch]
        return cls(environment, facts, hello, None if alike is None else dict(alike))


def host(
    lobby: Lobby, own: Own, *, timeout_s: float, deadline: float, stopping: Callable[[], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Run the meeting on rank 0. Returns the verdict and the launchers of all ranks."""
    attempt, meeting = uuid.uuid4().hex[:8], lobby.open(own.facts, own.config)
    hellos, skews, stopped = {0: own.hello}, {0: 0.0}, False
    looked, pause_s = time.time(), LEAST_TICK_S
    while True:
        told, before, looked = False, looked, time.time()
        for hello in lobby.arrivals(meeting):
            if "stop" in hello:
                told = True
                continue
            hellos[hello["rank"]] = hello
            now = time.time()
            skews[hello["rank"]] = hello["clock"] - min(max(hello["clock"], before), now)  # arrived in between
        if not stopped and (told or stopping()):
            stopped, deadline = True, min(deadline, time.monotonic() + LATECOMERS_S)
        if len(hellos) == own.environment.world_size or time.monotonic() > deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, TICK_S)
    tell_of_clocks(hellos, skews)
    failed = (Stopped.exit_code, "") if stopped else judge(hellos, own.environment.world_size, timeout_s=timeout_s)
    verdict = {"attempt": attempt, "error": failed, "ranks": len(hellos), "incarnations": incarnations_of(hellos)}
    if not lobby.decide(meeting, verdict):
        raise Unheard("another rank 0 has opened a meeting at the same store: give each rank a number of its own")
    if (
        failed and len(hellos) > 1 and own.environment.hosts_store
    ):  # the others must read the verdict before the store ends
        lobby.await_acknowledgements(meeting, HEARD_S)
    return verdict, sorted({hello["agent"] for hello in hellos.values()})


def incarnations_of(hellos: Mapping[int, dict[str, Any]]) -> tuple[str, int] | None:
    """Return (launch, number of replacements) of ranks that may all be restarted in place; None if not all may."""
    if not all("incarnation" in hello for hello in hellos.values()):
        return None
    incarnations = [hello["incarnation"] for hello in hellos.values()]
    return max(launch for _, launch in incarnations), sum(number for number, _ in incarnations)


def error_of(verdict: Mapping[str, Any]) -> tuple[int, str] | None:
    error = verdict["error"]
    return (int(error[0]), str(error[1])) if error else None


def attend_meeting(
    waiting: Lobby, speaking: Lobby, own: Own, *, deadline: float, stopping: Callable[[], bool]
) -> dict[str, Any]:
    """Take part in the meeting on a rank other than 0, in a thread, because the store blocks. Returns the verdict.

    Raises Unheard: rank 0 did not come. Raises Abandoned: rank 0 came, but it or the store was lost. Raises Stopped: this process
    received a stop request, and rank 0 did not answer.
    """
    guest = Guest(waiting, own, deadline + VERDICT_S, stopping)
    thread = threading.Thread(target=guest.run, name="meeting", daemon=True)
    thread.start()

    def say_so() -> None:
        if guest.arrived_in and not guest.stopped:
            guest.stopped = True
            speaking.arrive(guest.arrived_in, {"rank": own.environment.rank, "stop": True})

    timeout_s = deadline + VERDICT_S + STOP_S - time.monotonic()
    attend(thread, timeout_s=timeout_s, stopping=stopping, on_stop=say_so)
    if guest.verdict:
        return guest.verdict
    if stopping():
        raise Stopped
    raise guest.failure or Unheard(
        f"rank {own.environment.rank} has no answer from the rendezvous store: see rank 0's log"
    )


class Guest:
    """The meeting as seen by a rank other than 0."""

    def __init__(self, lobby: Lobby, own: Own, deadline: float, stopping: Callable[[], bool]):
        self.lobby, self.own, self.deadline, self.stopping = lobby, own, deadline, stopping
        self.arrived_in = 0
        self.stopped = False
        self.verdict: dict[str, Any] | None = None
        self.failure: Unheard | Abandoned | None = None

    def run(self) -> None:
        """Take part in meetings until one gives a verdict; sets `verdict` or `failure`. Blocks on the store: run it in a thread."""
        environment = self.own.environment
        try:
            self.verdict = self._meet()
        except RuntimeError as broken:
            if time.monotonic() < self.deadline - 1:
                self.failure = Abandoned(environment)
            else:
                who = f"rank {environment.rank} on {socket.gethostname()}"
                self.failure = Unheard(f"{who} waited in vain for rank 0 at {environment.store_at}: is it up?")
            self.failure.__cause__ = broken

    def _meet(self) -> dict[str, Any]:
        meeting = max(1, self.lobby.newest())
        while True:
            facts = self.lobby.facts(meeting, self._left())
            if "over" not in facts:
                differs = self._difference(meeting, facts)  # takes a while, and the clock is compared with the arrival
                hello = {**self.own.hello, "clock": time.time(), "differs": differs}
                number = self.lobby.arrive(meeting, hello)
                self.arrived_in = meeting
                verdict = self.lobby.verdict(meeting, self._left())
                if "over" not in verdict and self._is_meant(number, verdict):
                    if verdict["error"]:
                        self.lobby.acknowledge(meeting, of=verdict["ranks"] - 1)
                    return verdict
            meeting += 1

    def _is_meant(self, number: int, verdict: dict[str, Any]) -> bool:
        """Whether rank 0 has read arrival `number`, or both the verdict and a signal to this rank say to stop."""
        if number <= verdict["seen"] and number not in verdict["unread"]:
            return True
        return bool(self.stopping() and verdict["error"] and verdict["error"][0] == Stopped.exit_code)

    def _difference(self, meeting: int, facts: dict[str, Any]) -> str | None:
        theirs = self.own.facts
        if facts["config"] == theirs["config"] or None in (facts["config"], theirs["config"]):
            return difference(facts, theirs, {}, {}, rank=self.own.environment.rank)
        return difference(
            facts, theirs, self.lobby.config(meeting) or {}, self.own.config or {}, rank=self.own.environment.rank
        )

    def _left(self) -> float:
        return self.deadline - time.monotonic()


@functools.cache
def code_hash() -> str:
    """Return a digest of the kit's sources: two nodes with different checkouts must not train together."""
    sources = hashlib.sha256()
    root = Path(__file__).parents[2]
    found = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    for source in sorted(path for path in found if path.suffix == ".py"):
        sources.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return sources.hexdigest()[:12]


def digest(value: Any) -> str:
    """Return a digest of `value` as JSON: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judge(hellos: dict[int, dict[str, Any]], world_size: int, *, timeout_s: float) -> tuple[int, str] | None:
    """Return the error that keeps these ranks from forming a group as (exit code, message), or None."""
    for rank, hello in sorted(hellos.items()):
        if hello["error"]:
            code, message = hello["error"]
            return code, message if rank == 0 else f"rank {rank} on {hello['host']}: {message}"
    missing = [rank for rank in range(world_size) if rank not in hellos]
    if missing:
        is_again = any(launch for _, launch in (hello.get("incarnation", (0, "")) for hello in hellos.values()))
        return 1 if is_again else 2, (
            f"{len(hellos)} of {world_size} ranks arrived within dist.start_timeout_s={timeout_s:g}; "
            f"missing: {', '.join(map(str, missing[:8]))}{'...' if len(missing) > 8 else ''}: start as many processes as WORLD_SIZE says"
        )
    return next(((2, hello["differs"]) for _, hello in sorted(hellos.items()) if hello.get("differs")), None)


def difference(
    first: dict[str, Any], other: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any], *, rank: int
) -> str | None:
    """Describe how `rank` differs from rank 0 so that they must not train together; None if they match.

    `first` and `other` are the facts of rank 0 and of `rank`; `ours` and `theirs` their flat configs.
    """
    who = f"rank {rank} on {other['host']}"
    for key in ("torch", "code"):
        if other[key] != first[key]:
            return (
                f"{who} runs {key} {other[key]}, rank 0 on {first['host']} {first[key]}: install the same on every node"
            )
    if other["device"] != first["device"]:
        return (
            f"{who} would train on {other['device']}, rank 0 on {first['host']} on {first['device']}: "
            "see what nvidia-smi says on both, or choose device=cpu"
        )
    if differing := [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]:
        told = ", ".join(f"{key}={theirs.get(key)} (rank 0: {ours.get(key)})" for key in differing[:4])
        return f"{who} was started with another config: {told}; give every rank the same values"
    return None


def tell_of_clocks(hellos: dict[int, dict[str, Any]], skews: dict[int, float]) -> None:
    """Warn if a host's clock is more than `CLOCKS_APART_S` away from that of rank 0's host."""
    rank = max(skews, key=lambda rank: abs(skews[rank]))
    if abs(skews[rank]) > CLOCKS_APART_S:
        risk = ": torchrun compares them to tell who is alive, and may drop nodes or wait for them at the end"
        say(
            f"muster: the clocks of {hellos[rank]['host']} and {hellos[0]['host']} are {abs(skews[rank]):.0f} s apart"
            f"{risk if agents_compare_clocks() else ''}; synchronize them (NTP)"
        )
