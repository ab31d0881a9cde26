"""One storage, one run: who may commit there.

Two runs in two folders may be given one `checkpoint.storage`, and no lease on a folder tells them of each other. So an
attempt leaves a marker `owner-N.json` at the root of the storage, created only if nobody else has. N only grows: whoever
finds another marker than its own has lost the storage, and leaves it as it is. Nobody waits, so a run that was moved to
another folder, or that comes back with an empty one, goes on at once, and it is the earlier one that ends.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

from train.checkpoint.records import read_marker
from train.checkpoint.storage import Lost, Storage
from train.errors import Damaged, say
from train.faults.attempts import DONE, Attempt

MARKER = re.compile(r"owner-([0-9]{8,18})\.json")


class Owner:
    """An attempt's claim on `storage`. All methods raise StorageError."""

    def __init__(self, storage: Storage, *, folder: Path, attempt: str, agents: list[str]):
        self.storage, self.agents, self.token = storage, agents, 0
        self._marker: dict[str, Any] = {"folder": str(folder.absolute()), "host": socket.gethostname()}
        self._marker |= {"attempt": attempt, "agents": agents}

    def claim(self, before: Attempt) -> None:
        """Take the storage over; says so if it was another run's. `before` is the attempt before in the same folder.

        Raises:
            Lost: this launch had it, and another run has taken it over since.
        """
        self.storage.prepare()
        token, holder = self.newest()
        if holder and self._is_strange(holder, before):
            if before.is_same_launch(self.agents) and before.outcome != DONE:
                raise self._lost(holder)
            say(
                f"muster: checkpoint.storage={self.storage.root} was last used by {_name(holder)}: this run takes it "
                "over, and if that one still trains, it ends at its next checkpoint"
            )
        while not self._create(token + 1):
            token, _ = self.newest()
        for old in self._tokens():
            if old < self.token:
                with self.storage.doing("clear"):
                    self.storage.backend.delete(_file(old))

    def check(self) -> None:
        """Raises Lost if another attempt has taken the storage over. If somebody cleared the markers away, none has."""
        token, holder = self.newest()
        if token and holder != self._marker:
            raise self._lost(holder)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """The largest token, and the marker that has it; 0 and `{}` if there is none. Of a damaged one nothing is known."""
        token = max(self._tokens(), default=0)
        if not token:
            return 0, {}
        try:
            return token, self.storage.patiently(_file(token), lambda: self._read(token))
        except Damaged:
            if max(self._tokens(), default=0) != token:  # somebody faster has just replaced it
                return self.newest()
            return token, {}

    def _create(self, token: int) -> bool:
        """Whether the token is this attempt's now. Looks again: a slow one may find a number free that others are past."""
        try:
            with self.storage.doing("claim", FileExistsError):
                self.storage.backend.create(_file(token), json.dumps(self._marker).encode())
        except FileExistsError:
            return False
        self.token = token
        return self.newest() == (token, self._marker)

    def _tokens(self) -> list[int]:
        with self.storage.doing("list"):
            return [int(found[1]) for each in self.storage.backend.list() if (found := MARKER.fullmatch(each))]

    def _read(self, token: int) -> dict[str, Any]:
        with self.storage.backend.get(_file(token)) as file:
            return read_marker(file.read())

    def _is_strange(self, holder: dict[str, Any], before: Attempt) -> bool:
        """Whether the marker is of no earlier attempt at this run, as far as can be told."""
        own = self._marker
        return (
            holder.get("attempt") != before.attempt
            and {*holder.get("agents", ())}.isdisjoint(self.agents)
            and (holder.get("folder"), holder.get("host")) != (own["folder"], own["host"])
        )

    def _lost(self, holder: dict[str, Any]) -> Lost:
        return Lost(
            f"checkpoint.storage={self.storage.root} was taken over by {_name(holder)}: give each run a storage of its own"
        )


def _file(token: int) -> str:
    return f"owner-{token:08d}.json"


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    return f"a run in {holder.get('folder')} on {holder.get('host')} (attempt {holder.get('attempt')})"
