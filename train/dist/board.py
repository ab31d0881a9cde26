"""All keys that ranks use on the rendezvous store, outside of collectives.

The store is one thread in one process, so the work of each request must not grow with the number of ranks. A rank posts
under its own key, one reader fetches all keys with one `multi_get`, and a barrier is a counter whose last contributor
sets one more key (`_Client.count`) instead of a wait for a key of each rank.

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
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store

CLIENTS = 4
"""Store connections of each rank: one for the process group, two for `Board`, one during the meeting."""
ANSWER_S = 1.0
BYE_S = 10.0
POLL_S = 0.02
LEAVING_PER_S = 5000.0  # polls of the store by all leaving ranks together


class _Client:
    """A store connection that counts its operations by name. An operation on several keys counts once per key."""

    def __init__(self, store: Store, operations: Counter[str]):
        self._store, self._operations = store, operations

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""
        self._operations["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Return the value of `key`; blocks until the key is set."""
        self._operations["get"] += 1
        return str(self._store.get(key).decode())

    def gets(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, in order; blocks until all are set."""
        self._operations["multi_get"] += len(keys)
        return list(self._store.multi_get(keys))

    def check(self, *keys: str) -> bool:
        """Whether all `keys` are set. Does not block."""
        self._operations["check"] += len(keys)
        return bool(self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add `number` to the counter `key` and return its new value."""
        self._operations["add"] += 1
        return int(self._store.add(key, number))

    def put_first(self, key: str, value: str) -> str:
        """Set `key` only if it is unset. Returns the value that it then has."""
        self._operations["compare_set"] += 1
        return str(self._store.compare_set(key, "", value).decode())

    def wait(self, key: str, seconds: float) -> None:
        """Wait up to `seconds` until `key` is set."""
        self._operations["wait"] += 1
        self._store.wait([key], timedelta(seconds=seconds))

    def delete(self, *keys: str) -> None:
        """Delete `keys`."""
        for key in keys:
            self._operations["delete"] += 1
            self._store.delete_key(key)

    def count(self, gate: str, *, of: int) -> None:
        """Add this rank to the counter of `gate`; the last of `of` ranks opens the gate."""
        if self.add(f"{gate}/count", 1) == of:
            self.set(f"{gate}/all", "1")

    def await_all(self, gate: str, seconds: float) -> None:
        """Wait up to `seconds` until `gate` is open."""
        self.wait(f"{gate}/all", seconds)


class Lobby:
    """The keys that ranks use to meet, before they form an attempt. `meeting.py` describes the protocol."""

    def __init__(self, store: Store, operations: Counter[str] | None = None):
        self.operations = Counter[str]() if operations is None else operations
        self._client = _Client(store, self.operations)
        self._unread: set[int] = set()
        self._seen = 0

    def newest(self) -> int:
        """Return the number of the newest meeting; 0 if no meeting was opened."""
        return self._client.add("meet/newest", 0)

    def open(self, facts: dict[str, Any], config: dict[str, Any] | None) -> int:
        """Rank 0: end the previous meeting for ranks that still wait in it, and open the next. Returns its number."""
        number = self._client.add("meet/newest", 1)
        if number > 1:
            for door in ("open", "verdict"):
                self._client.put_first(f"meet/{number - 1}/{door}", json.dumps({"over": True}))
        self._client.set(f"meet/{number}/config", json.dumps(config))
        self._client.set(f"meet/{number}/open", json.dumps(facts))
        return number

    def facts(self, meeting: int, seconds: float) -> dict[str, Any]:
        """Wait until rank 0 opens `meeting`, and return the facts that it posted."""
        return self._awaited(f"meet/{meeting}/open", seconds)

    def config(self, meeting: int) -> dict[str, Any] | None:
        """Return rank 0's config, flattened."""
        config: dict[str, Any] | None = json.loads(self._client.get(f"meet/{meeting}/config"))
        return config

    def arrive(self, meeting: int, hello: dict[str, Any]) -> int:
        """Post `hello` and return the number of this arrival, which is unique within the meeting."""
        number = self._client.add(f"meet/{meeting}/arrivals", 1)
        self._client.set(f"meet/{meeting}/arrival/{number}", json.dumps(hello))
        return number

    def arrivals(self, meeting: int) -> list[dict[str, Any]]:
        """Rank 0: return the hellos that arrived since the previous call."""
        latest = self._client.add(f"meet/{meeting}/arrivals", 0)
        self._unread |= {*range(self._seen + 1, latest + 1)}
        self._seen = latest
        keys = {number: f"meet/{meeting}/arrival/{number}" for number in sorted(self._unread)}
        if keys and not self._client.check(*keys.values()):  # some hellos are not posted yet, or never will be
            keys = {number: key for number, key in keys.items() if self._client.check(key)}
        hellos = [json.loads(text) for text in self._client.gets([*keys.values()])] if keys else []
        self._client.delete(*keys.values())
        self._unread -= {*keys}
        return hellos

    def decide(self, meeting: int, verdict: dict[str, Any]) -> bool:
        """Rank 0: post the verdict for all ranks whose hello was read. False if a later rank 0 ended the meeting."""
        mine = json.dumps({**verdict, "seen": self._seen, "unread": sorted(self._unread)})
        return self._client.put_first(f"meet/{meeting}/verdict", mine) == mine

    def verdict(self, meeting: int, seconds: float) -> dict[str, Any]:
        """Wait for the verdict of `meeting` and return it."""
        return self._awaited(f"meet/{meeting}/verdict", seconds)

    def acknowledge(self, meeting: int, *, of: int) -> None:
        """Confirm that this rank has read the verdict; `of` ranks are to confirm it."""
        self._client.count(f"meet/{meeting}/heard", of=of)

    def await_acknowledgements(self, meeting: int, seconds: float) -> None:
        """Wait up to `seconds` until all ranks have confirmed the verdict."""
        with contextlib.suppress(RuntimeError):
            self._client.await_all(f"meet/{meeting}/heard", seconds)

    def _awaited(self, key: str, seconds: float) -> dict[str, Any]:
        self._client.wait(key, max(seconds, 0.001))
        value: dict[str, Any] = json.loads(self._client.get(key))
        return value


class Board:
    """The keys of one attempt. `operations` counts this rank's store operations by name."""

    def __init__(self, store: Store, *, attempt: str, rank: int, size: int):
        own = self._own = PrefixStore(attempt, store)
        self.rank, self.size = rank, size
        self.operations = Counter[str]()
        self.group_store: Store = PrefixStore("group", own)
        """The store of torch's process group."""
        self._quick, self._patient = (_Client(own.clone() if size > 1 else own, self.operations) for _ in range(2))
        self._part: tuple[int, int] = (0, 0)

    def rpc_store(self) -> Store:
        """Return a separate connection for torch's RPC agents, because they change its timeout."""
        return PrefixStore("rpc", self._own.clone())

    # Reachability, if no process group could be formed (reach.py)

    def post_reach(self, text: str) -> None:
        """Post the address at which this rank can be reached."""
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

    def post_beat(self, text: str) -> None:
        """Post this rank's heartbeat."""
        self._quick.set(f"beat/{self.rank}", text)

    def first_beat(self) -> bytes:
        """Return rank 0's newest heartbeat."""
        return self._quick.gets(["beat/0"])[0]

    def beats(self) -> Sequence[bytes]:
        """Return every rank's newest heartbeat. Every rank must have posted one before, or the call blocks."""
        return self._quick.gets([f"beat/{rank}" for rank in range(self.size)])

    # Stopping (faults/preemption.py)

    def ask_to_stop(self) -> None:
        """Request that all ranks stop."""
        self._quick.set("stop", "1")

    def asked_to_stop(self) -> bool:
        """Whether a rank has requested a stop."""
        return self._quick.check("stop")

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
        self._patient.await_all(f"save/{save}", seconds)
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
        self._patient.wait(f"save/{save}/end", seconds)
        said: dict[str, Any] = json.loads(self._patient.get(f"save/{save}/end"))
        return said

    # Leaving (job/exit.py). The store may be gone or hang forever, so none of these calls waits long for it.

    def claim_failure(self, record: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Post the failure of this rank, unless another rank has posted one.

        Returns:
            Whether this rank was the first, and the record of the first rank.
        """
        mine = json.dumps([self.rank, record])
        said = within(ANSWER_S, lambda: self._quick.put_first("failed", mine))
        rank, first = json.loads(said or mine)
        return rank == self.rank, first

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
        """Announce that this process ends in a failure; the process that holds the store waits for the others.

        The others need the store to read the cause. The wait takes at most `ANSWER_S` and leaves out the `gone` ranks.
        Returns whether all ranks, less `gone`, are leaving.
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
