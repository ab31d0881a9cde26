"""What ranks post for each other on the rendezvous store, apart from collectives. Every key has its name here.

The store is one thread in one process, so what a rank asks of it must not grow with the number of ranks: a rank posts
under a key of its own, one reader takes all of those with one `multi_get`, and "all have" is a counter whose last
contributor opens a gate (`_Client.count`) instead of a wait for as many keys.

Two clients besides the process group's, made at the start: while leaving, the address of the store may already be
gone from DNS. `_quick` asks only what is answered at once, so that any thread may use it; `_patient` is for the
checkpoint's writer, which waits.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store

CLIENTS = 4
"""Connections of each rank to the store: the process group's, two of its own, and one more while the ranks meet."""
ANSWER_S = 1.0
BYE_S = 10.0
POLL_S = 0.02
LEAVING_PER_S = 5000.0  # looks at the store by all leaving ranks together


class _Client:
    """A connection to the store that counts the operations it asks for, by name; one on several keys counts as many."""

    def __init__(self, store: Store, operations: Counter[str]):
        self._store, self._operations = store, operations

    def set(self, key: str, value: str) -> None:
        self._operations["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> str:
        self._operations["get"] += 1
        return str(self._store.get(key).decode())

    def gets(self, keys: list[str]) -> list[bytes]:
        self._operations["multi_get"] += len(keys)
        return list(self._store.multi_get(keys))

    def check(self, *keys: str) -> bool:
        self._operations["check"] += len(keys)
        return bool(self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        self._operations["add"] += 1
        return int(self._store.add(key, number))

    def put_first(self, key: str, value: str) -> str:
        """Set `key` if nobody has; what it holds afterwards."""
        self._operations["compare_set"] += 1
        return str(self._store.compare_set(key, "", value).decode())

    def wait(self, key: str, seconds: float) -> None:
        self._operations["wait"] += 1
        self._store.wait([key], timedelta(seconds=seconds))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._operations["delete"] += 1
            self._store.delete_key(key)

    def count(self, gate: str, *, of: int) -> None:
        """Be counted at `gate`, which opens with the last one."""
        if self.add(f"{gate}/count", 1) == of:
            self.set(f"{gate}/all", "1")

    def await_all(self, gate: str, seconds: float) -> None:
        self.wait(f"{gate}/all", seconds)


class Lobby:
    """The keys by which ranks meet, before they are an attempt. `meeting.py` says what they mean."""

    def __init__(self, store: Store, operations: Counter[str] | None = None):
        self.operations = Counter[str]() if operations is None else operations
        self._client = _Client(store, self.operations)
        self._unread: set[int] = set()
        self._seen = 0

    def newest(self) -> int:
        """The number of the meeting that was opened last; 0 if none was."""
        return self._client.add("meet/newest", 0)

    def open(self, facts: dict[str, Any], config: dict[str, Any] | None) -> int:
        """Rank 0: close the meeting before this one for whoever still waits in it, and open the next."""
        number = self._client.add("meet/newest", 1)
        if number > 1:
            for door in ("open", "verdict"):
                self._client.put_first(f"meet/{number - 1}/{door}", json.dumps({"over": True}))
        self._client.set(f"meet/{number}/config", json.dumps(config))
        self._client.set(f"meet/{number}/open", json.dumps(facts))
        return number

    def facts(self, meeting: int, seconds: float) -> dict[str, Any]:
        """What rank 0 said when it opened; waits for it."""
        return self._awaited(f"meet/{meeting}/open", seconds)

    def config(self, meeting: int) -> dict[str, Any] | None:
        """Rank 0's, flattened."""
        config: dict[str, Any] | None = json.loads(self._client.get(f"meet/{meeting}/config"))
        return config

    def arrive(self, meeting: int, hello: dict[str, Any]) -> int:
        """Post `hello`; the number of this arrival, which no other has."""
        number = self._client.add(f"meet/{meeting}/arrivals", 1)
        self._client.set(f"meet/{meeting}/arrival/{number}", json.dumps(hello))
        return number

    def arrivals(self, meeting: int) -> list[dict[str, Any]]:
        """Rank 0: hellos that have come since it asked last."""
        latest = self._client.add(f"meet/{meeting}/arrivals", 0)
        self._unread |= {*range(self._seen + 1, latest + 1)}
        self._seen = latest
        keys = {number: f"meet/{meeting}/arrival/{number}" for number in sorted(self._unread)}
        if keys and not self._client.check(*keys.values()):  # numbers that have no hello yet, or never will
            keys = {number: key for number, key in keys.items() if self._client.check(key)}
        hellos = [json.loads(text) for text in self._client.gets([*keys.values()])] if keys else []
        self._client.delete(*keys.values())
        self._unread -= {*keys}
        return hellos

    def decide(self, meeting: int, verdict: dict[str, Any]) -> bool:
        """Rank 0: give the verdict to all whose hello it has read; False if a later rank 0 has closed the meeting."""
        mine = json.dumps({**verdict, "seen": self._seen, "unread": sorted(self._unread)})
        return self._client.put_first(f"meet/{meeting}/verdict", mine) == mine

    def verdict(self, meeting: int, seconds: float) -> dict[str, Any]:
        """Waits for it."""
        return self._awaited(f"meet/{meeting}/verdict", seconds)

    def acknowledge(self, meeting: int, *, of: int) -> None:
        self._client.count(f"meet/{meeting}/heard", of=of)

    def await_acknowledgements(self, meeting: int, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):
            self._client.await_all(f"meet/{meeting}/heard", seconds)

    def _awaited(self, key: str, seconds: float) -> dict[str, Any]:
        self._client.wait(key, max(seconds, 0.001))
        value: dict[str, Any] = json.loads(self._client.get(key))
        return value


class Board:
    """The keys of one attempt. `operations` counts what this rank has asked of the store, by name."""

    def __init__(self, store: Store, *, attempt: str, rank: int, size: int):
        own = self._own = PrefixStore(attempt, store)
        self.rank, self.size = rank, size
        self.operations = Counter[str]()
        self.group_store: Store = PrefixStore("group", own)
        """For torch's process group."""
        self._quick, self._patient = (_Client(own.clone() if size > 1 else own, self.operations) for _ in range(2))
        self._part: tuple[int, int] = (0, 0)

    def rpc_store(self) -> Store:
        """For torch's RPC agents: a connection of their own, because they change its timeout."""
        return PrefixStore("rpc", self._own.clone())

    # Who can be reached, where no group could be formed (reach.py)

    def post_reach(self, text: str) -> None:
        self._patient.set(f"reach/{self.rank}", text)
        self._patient.count("reach", of=self.size)

    def reaches(self, seconds: float) -> dict[int, str]:
        """What the ranks have posted by then, this one among them."""
        posted = list(range(self.size))
        try:
            self._patient.await_all("reach", seconds)
        except DistStoreError:
            posted = [rank for rank in posted if self._patient.check(f"reach/{rank}")]
        texts = self._patient.gets([f"reach/{rank}" for rank in posted])
        return {rank: text.decode() for rank, text in zip(posted, texts, strict=True)}

    def reached(self, seconds: float) -> None:
        """Until all have tried, but for no longer than `seconds`."""
        with contextlib.suppress(RuntimeError):  # the store may go with a rank that has ended
            self._patient.count("reached", of=self.size)
            self._patient.await_all("reached", seconds)

    # Signs of life (faults/heartbeat.py)

    def post_beat(self, text: str) -> None:
        self._quick.set(f"beat/{self.rank}", text)

    def first_beat(self) -> bytes:
        """Rank 0's newest."""
        return self._quick.gets(["beat/0"])[0]

    def beats(self) -> Sequence[bytes]:
        """Every rank's newest, which all must have posted before: an absent one would be waited for."""
        return self._quick.gets([f"beat/{rank}" for rank in range(self.size)])

    # Stopping (faults/preemption.py)

    def ask_to_stop(self) -> None:
        self._quick.set("stop", "1")

    def asked_to_stop(self) -> bool:
        return self._quick.check("stop")

    def post_begun(self, number: int) -> None:
        """Say how far this rank has begun; the last to say so announces the largest number of all."""
        self._quick.set(f"stop/begun/{self.rank}", str(number))
        if self._quick.add("stop/count", 1) == self.size:
            begun = self._quick.gets([f"stop/begun/{rank}" for rank in range(self.size)])
            self._quick.set("stop/target", str(max(map(int, begun))))

    def stop_target(self) -> int | None:
        """Up to where all ranks go; None until all have said how far they are."""
        return int(self._quick.get("stop/target")) if self._quick.check("stop/target") else None

    # A save (checkpoint/), numbered from 1, the same on every rank. Keys are used again, or deleted two saves later.

    def post_part(self, save: int, said: dict[str, Any]) -> None:
        """What has become of this rank's part; may be said again, with a worse end."""
        self._patient.set(f"save/part/{self.rank}", json.dumps({"save": save, **said}))
        if self._part[0] != save:
            self._part = (save, 1)
            self._patient.count(f"save/{save}", of=self.size)

    def parts(self, save: int, seconds: float) -> list[dict[str, Any]]:
        """Rank 0: every rank's part, once all have posted theirs. Raises DistStoreError after `seconds`."""
        self._patient.await_all(f"save/{save}", seconds)
        said = [json.loads(text) for text in self._patient.gets([f"save/part/{rank}" for rank in range(self.size)])]
        ahead = {"failed": "a rank gave this save up and has begun the next"}
        return [part if part["save"] == save else ahead for part in said]

    def end_save(self, save: int, said: dict[str, Any]) -> None:
        """Rank 0: say how it ended."""
        self._patient.set(f"save/{save}/end", json.dumps(said))
        if save > 2:
            self._patient.delete(*(f"save/{save - 2}/{name}" for name in ("count", "all", "end")))

    def save_end(self, save: int, seconds: float) -> dict[str, Any]:
        """What rank 0 said of its end. Raises DistStoreError after `seconds`."""
        self._patient.wait(f"save/{save}/end", seconds)
        said: dict[str, Any] = json.loads(self._patient.get(f"save/{save}/end"))
        return said

    # Leaving (faults/exit.py). The store may be gone, or silent for ever: none of these waits for it for long.

    def claim_failure(self, record: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Post why this rank fails, unless another did before; whether it was the first, and the first one's record."""
        mine = json.dumps([self.rank, record])
        said = within(ANSWER_S, lambda: self._quick.put_first("failed", mine))
        rank, first = json.loads(said or mine)
        return rank == self.rank, first

    def first_failure(self, wait_s: float, *, enough: Callable[[], Any] = lambda: False) -> dict[str, Any] | None:
        """What another rank has posted by `claim_failure`, if it does so within `wait_s` or before it is `enough`."""
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
        """Before this process ends in a failure: if the store ends with it, let the others, less `gone`, read why.

        Whether all of them have.
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
        """At a good end: the process that holds the store goes last."""
        with contextlib.suppress(RuntimeError):
            self._quick.count("bye", of=self.size)
            if hosts_store:
                self._quick.await_all("bye", BYE_S)


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What the store answers; None if it is gone or silent: a read from a store that was cut off has no timeout."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
