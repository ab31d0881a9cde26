"""The keys of the rendezvous store that the ranks of an attempt use, outside of collectives.

Each rank opens two clients besides the process group's. Both are opened at the start, because the store's address may
have left DNS by the time the rank leaves. `_quick` makes only requests that are answered at once, so any thread may use
it. `_patient` makes the waits of the checkpoint's writer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistBackendError, DistStoreError, PrefixStore, Store

from muster.world.node_memory import FIRST, LOST, POSTED, STOP, LastTimes, NodeMemory
from muster.world.store_client import Client, Connections

CLIENTS = 4
"""The most store connections of a rank: one for the process group, two for `StoreKeys`, one for the meeting."""
ANSWER_S = 1.0
BYE_S = 10.0
POLL_S = 0.02
LEAVING_PER_S = 5000.0  # polls of the store by all leaving ranks together
DUE = 0.75  # of a period: the node's next post is due, so that a rank that comes a little early does not leave it for a period


class StoreKeys:
    """The keys of one attempt. `operations` counts this rank's store operations by name.

    connections: further connections to the store; None: they are opened.
    incarnations: the replacements in the launch, if a rank that dies may be restarted in place. The waits for a save then raise
        DistBackendError once a rank of this attempt has died.
    node: the memory of this node's ranks, one of which at a time posts and asks for all.
    """

    def __init__(
        self,
        store: Store,
        *,
        attempt: str,
        rank: int,
        size: int,
        connections: Connections | None = None,
        incarnations: Incarnations | None = None,
        node: NodeMemory | None = None,
    ):
        own = self._own = PrefixStore(attempt, store)
        connections = connections or (Connections(store) if size > 1 else None)
        self.rank, self.size, self.connections, self.incarnations = rank, size, connections, incarnations
        self.operations = Counter[str]()
        self.group_store: Store = PrefixStore("group", own)
        """The store of torch's process group."""
        stores = (
            [PrefixStore(attempt, connections.get(name)) for name in ("quick", "patient")]
            if connections
            else [own, own]
        )
        self._quick, self._patient = (Client(each, self.operations) for each in stores)
        self._part: tuple[int, int] = (0, 0)
        self._node, self._times = node, node.times if node else LastTimes()
        self._posts: list[str] | None = None
        self._single: list[int] = []

    def is_one_lost(self, *, every_s: float = 0.0) -> bool:
        """Whether a rank of this attempt has died, and is restarted in place for the next. Answered at once.

        every_s: the node's ranks ask the store no more often, and read the last answer from their memory.
        """
        incarnations = self.incarnations
        return incarnations is not None and self._times.known(LOST, every_s, incarnations.is_one_lost)

    def take_turn(self) -> int:
        """Return how many ranks have called this, with this one. Answered at once."""
        return self._quick.add("turns", 1)

    def rpc_store(self) -> Store:
        """Return a separate connection for torch's RPC agents, because they change its timeout."""
        return PrefixStore("rpc", self._own.clone())

    # The network interface (rendezvous/interfaces.py)

    def exchange_address(self, address: str) -> str:
        return self._quick.exchange_address(address, of=self.size)

    # Reachability, if no process group could be formed (rendezvous/network.py)

    def post_reach(self, text: str) -> None:
        self._patient.set(f"reach/{self.rank}", text)
        self._patient.count("reach", of=self.size)

    def reaches(self, seconds: float) -> dict[int, str]:
        """Wait up to `seconds` for all ranks, and return the posted addresses by rank, this rank's included."""
        posted = list(range(self.size))
        try:
            self._patient.await_all("reach", seconds)
        except DistStoreError:
            posted = [rank for rank in posted if self._patient.check(f"reach/{rank}")]
        texts = self._patient.gets([f"reach/{rank}" for rank in posted])
        return {rank: text.decode() for rank, text in zip(posted, texts, strict=True)}

    def reached(self, seconds: float) -> None:
        """Wait up to `seconds` until all ranks have tried their connections."""
        with contextlib.suppress(RuntimeError):  # the store may end with rank 0
            self._patient.count("reached", of=self.size)
            self._patient.await_all("reached", seconds)

    # Heartbeats (faults/heartbeat.py)

    @property
    def beat_lag(self) -> int:
        """The number of heartbeat periods within which rank 0 sees a new beat of any rank."""
        return 4 if self._posts else 2  # written, posted and read

    def post_beat(self, text: str, *, every_s: float = 1.0) -> None:
        """Post this rank's heartbeat. Of the ranks of a node, one posts for all, every `every_s`.

        The first call, which all ranks make before any rank reads, also says where this rank's beats are.
        """
        node = self._node
        if not node:
            return self._quick.set(f"beat/{self.rank}", text)
        node.write(self.rank, text if self.rank else "")
        if self.rank == 0:
            self._times.set_known(FIRST)  # it reads its node's beats from the memory, and nobody posts them
            return self._quick.set("beat/0", text)
        is_read_here = bool(text) and self._times.is_known(FIRST)
        if not is_read_here and self._times.claims(POSTED, every_s * DUE):
            beats = node.read().items()
            self._quick.set(f"beats/{node.token}", "\n".join(f"{rank} {beat.decode()}" for rank, beat in beats))
        if not text:
            self._quick.set(f"beat/{self.rank}", node.token)
        return None

    def first_beat(self) -> bytes:
        return self._quick.gets(["beat/0"])[0]

    def beats(self) -> Sequence[bytes]:
        """Rank 0: return every other rank's newest heartbeat. Every rank must have posted one before, or the call blocks."""
        if self._posts is None:
            said = self._quick.gets([f"beat/{rank}" for rank in range(self.size)])
            tokens = {rank: one.decode() for rank, one in enumerate(said) if one and one[:1] != b"{"}
            self._single = [rank for rank in range(1, self.size) if rank not in tokens]
            self._posts = sorted({*tokens.values()} - {self._node.token if self._node else ""})
        found = self._node.read() if self._node else {}
        keys = [f"beat/{rank}" for rank in self._single] + [f"beats/{token}" for token in self._posts]
        said = self._quick.gets(keys) if keys else []
        found |= zip(self._single, said, strict=False)
        for line in (line for post in said[len(self._single) :] for line in post.split(b"\n")):
            rank, _, beat = line.partition(b" ")
            found[int(rank)] = beat
        return [found.get(rank, b"") for rank in range(self.size)]

    # Stopping (faults/preemption.py)

    def ask_to_stop(self) -> None:
        self._quick.set("stop", "1")
        self._times.set_known(STOP)

    def asked_to_stop(self, *, every_s: float = 0.0) -> bool:
        """Whether a rank has requested a stop. `every_s`: see `is_one_lost`."""
        return self._times.known(STOP, every_s, lambda: self._quick.check("stop"))

    def post_begun(self, number: int) -> None:
        """Post how many phases this rank has begun. The last rank to post sets the largest number as the target."""
        self._quick.set(f"stop/begun/{self.rank}", str(number))
        if self._quick.add("stop/count", 1) == self.size:
            begun = self._quick.gets([f"stop/begun/{rank}" for rank in range(self.size)])
            self._quick.set("stop/target", str(max(map(int, begun))))

    def stop_target(self) -> int | None:
        """Return the phase up to which all ranks go on; None until all ranks have posted theirs."""
        return int(self._quick.get("stop/target")) if self._quick.check("stop/target") else None

    # Saves (checkpoint/), numbered from 1, the same on every rank. Keys are reused, or deleted two saves later.

    def post_part(self, save: int, said: dict[str, Any]) -> None:
        """Post the result of this rank's part of a save. A later call may replace it with a worse result."""
        self._patient.set(f"save/part/{self.rank}", json.dumps({"save": save, **said}))
        if self._part[0] != save:
            self._part = (save, 1)
            self._patient.count(f"save/{save}", of=self.size)

    def parts(self, save: int, seconds: float) -> list[dict[str, Any]]:
        """Rank 0: wait for all ranks' parts of a save and return them. Raises DistStoreError after `seconds`."""
        self._await(f"save/{save}/all", seconds)
        said = [json.loads(text) for text in self._patient.gets([f"save/part/{rank}" for rank in range(self.size)])]
        ahead = {"failed": "a rank gave this save up and has begun the next"}
        return [part if part["save"] == save else ahead for part in said]

    def end_save(self, save: int, said: dict[str, Any]) -> None:
        """Rank 0: post how the save ended."""
        self._patient.set(f"save/{save}/end", json.dumps(said))
        if save > 2:
            self._patient.delete(*(f"save/{save - 2}/{name}" for name in ("count", "all", "end")))

    def save_end(self, save: int, seconds: float) -> dict[str, Any]:
        """Wait for the end of the save that rank 0 posts. Raises DistStoreError after `seconds`."""
        self._await(f"save/{save}/end", seconds)
        said: dict[str, Any] = json.loads(self._patient.get(f"save/{save}/end"))
        return said

    def _await(self, key: str, seconds: float) -> None:
        if self.incarnations is None:
            return self._patient.wait(key, seconds)
        deadline = time.monotonic() + seconds
        while not self._patient.check(key) and time.monotonic() < deadline:
            if self.incarnations.is_one_lost():
                raise DistBackendError("a rank has died while the others waited for its part of a checkpoint")
            time.sleep(POLL_S)
        return self._patient.wait(key, ANSWER_S)

    # The end of a user's loop (job/bootstrap.py)

    def post_end(self, step: int) -> None:
        self._quick.set(f"end/{self.rank}", str(step))
        self._quick.count("end", of=self.size)

    def ends(self) -> list[int] | None:
        """Return the step after which each rank's loop has ended; None before all have ended. Answered at once."""
        if not self._quick.check("end/all"):
            return None
        return [int(text) for text in self._quick.gets([f"end/{rank}" for rank in range(self.size)])]

    # Leaving (attempt/failure_report.py). The store may be gone or hang forever, so none of these calls waits long for it.

    def claim_failure(self, record: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Post the failure of this rank, unless another rank has posted one. Return (is it the first, the first rank's record)."""
        mine = json.dumps([self.rank, record])
        said = within(ANSWER_S, lambda: self._quick.put_first("failed", mine))
        rank, first = json.loads(said or mine)
        return rank == self.rank, first

    def has_failure(self) -> bool:
        """Whether a rank has posted its failure. Answered at once."""
        return self._quick.check("failed")

    def first_failure(self, wait_s: float, *, enough: Callable[[], Any] = lambda: False) -> dict[str, Any] | None:
        """Return the failure posted by `claim_failure`; None after `wait_s`, or when `enough` returns true before."""
        pause_s = max(POLL_S, self.size / LEAVING_PER_S)

        def ask() -> str | None:
            deadline = time.monotonic() + wait_s
            while not self._quick.check("failed"):
                if time.monotonic() > deadline or enough():
                    return None
                time.sleep(pause_s)
            return self._quick.get("failed")

        said = within(wait_s + ANSWER_S, ask)
        return json.loads(said)[1] if said else None

    def leave(self, *, hosts_store: bool, gone: int) -> bool:
        """Announce that this process ends in a failure; return whether all ranks, less `gone`, are leaving.

        The process that holds the store waits for the others, which read the cause from it, at most `ANSWER_S`.
        """

        def ask() -> bool:
            left = self._quick.add("left", 1)
            deadline = time.monotonic() + ANSWER_S
            while hosts_store and left < self.size - gone and time.monotonic() < deadline:
                time.sleep(POLL_S)
                left = self._quick.add("left", 0)
            return left >= self.size - gone

        return bool(within(ANSWER_S, ask))

    def say_bye(self, *, hosts_store: bool) -> None:
        """Announce a successful end; the process that holds the store waits for all ranks, at most `BYE_S`."""
        with contextlib.suppress(RuntimeError):
            self._quick.count("bye", of=self.size)
            if hosts_store:
                self._quick.await_all("bye", BYE_S)


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`, or None if the store is gone or silent for `seconds`.

    Calls `ask` in a thread, because a read from a store that was cut off has no timeout.
    """
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


class Incarnations:
    """The replacements in one launch. `launch`: its first attempt. `known`: the replacements among the ranks of this group."""

    def __init__(self, store: Store, launch: str, *, known: int = 0):
        self.launch, self.known = launch, known
        self._store = PrefixStore(launch, store)

    def announce(self) -> None:
        self._store.add("incarnations", 1)

    def is_one_lost(self) -> bool:
        """Whether a rank of this group has died and is restarted in place. Answered at once."""
        return int(self._store.add("incarnations", 0)) > self.known
