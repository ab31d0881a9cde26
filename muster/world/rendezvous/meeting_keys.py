"""The keys of the rendezvous store by which ranks meet, before they form an attempt. `meeting.py` describes the protocol."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

from torch.distributed import Store

from muster.world.store_client import Client


class Lobby:
    def __init__(self, store: Store, operations: Counter[str] | None = None):
        self.operations = Counter[str]() if operations is None else operations
        self._client = Client(store, self.operations)
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
        return self._awaited(f"meet/{meeting}/verdict", seconds)

    def acknowledge(self, meeting: int, *, of: int) -> None:
        """Confirm that this rank has read the verdict; `of` ranks are to confirm it."""
        self._client.count(f"meet/{meeting}/heard", of=of)

    def await_acknowledgements(self, meeting: int, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):
            self._client.await_all(f"meet/{meeting}/heard", seconds)

    def _awaited(self, key: str, seconds: float) -> dict[str, Any]:
        self._client.wait(key, max(seconds, 0.001))
        value: dict[str, Any] = json.loads(self._client.get(key))
        return value
