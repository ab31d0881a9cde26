"""A client of the rendezvous store.

The store is one thread in one process, so the work of each request must not grow with the number of ranks. A rank posts
under its own key, one reader fetches all keys with one `multi_get`, and a barrier is a counter whose last contributor
sets one more key (`Client.count`) instead of a wait for a key of each rank.

Without the kit: torchrun.py loads this file by its path.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

from torch.distributed import Store

ADDRESS_S = 60.0  # all have met, and post their addresses next
POLL_S = 0.02


class Connections:
    """The connections of one process to the rendezvous store, opened when they are first used.

    A process that goes on in another attempt keeps them: for each new one the store looks up the name of the address that it
    comes from, and answers nobody meanwhile, for 5 s if the name server is silent (`LibUVStoreDaemon::onConnect`).
    `first`: the connection of the meeting and of the process group.
    """

    def __init__(self, first: Store):
        self.first = first
        self._others: dict[str, Store] = {}

    def get(self, name: str) -> Store:
        """Return the connection of this name. `quick` is for requests that are answered at once, from any thread."""
        if name not in self._others:
            self._others[name] = self.first.clone()
        return self._others[name]


class Client:
    """A store connection that counts its operations by name. An operation on several keys counts once per key."""

    def __init__(self, store: Store, operations: Counter[str]):
        self._store, self._operations = store, operations

    def set(self, key: str, value: str) -> None:
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
        self._operations["add"] += 1
        return int(self._store.add(key, number))

    def put_first(self, key: str, value: str) -> str:
        """Set `key` only if it is unset. Returns the value that it then has."""
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
        """Add this rank to the counter of `gate`; the last of `of` ranks opens the gate."""
        if self.add(f"{gate}/count", 1) == of:
            self.set(f"{gate}/all", "1")

    def await_all(self, gate: str, seconds: float) -> None:
        self.wait(f"{gate}/all", seconds)

    def exchange_address(self, address: str, *, of: int) -> str:
        """Post this host's address for the others, and return it; for "", return the first that another one posts.

        Only the call with "" waits: for an address, until all `of` callers have called, or for `ADDRESS_S`; then it returns "".
        """
        if address:
            self.set("address", address)
        self.count("addresses", of=of)
        deadline = time.monotonic() + ADDRESS_S
        while not address and time.monotonic() < deadline:
            has_ended = self.check("addresses/all")
            if self.check("address"):
                return self.get("address")
            if has_ended:
                break
            time.sleep(POLL_S)
        return address
