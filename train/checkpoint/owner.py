"""Exclusive ownership of a checkpoint storage: only the owner commits there.

Two runs in two folders may be given the same `checkpoint.storage`, and the lease on a folder does not cover it. So an
attempt creates a marker `owner-N.json` at the root of the storage, only if it does not exist. N only grows: a run that
finds a newer marker than its own has lost the storage and leaves it as it is. A claim never waits, so a run that was
moved to another folder, or that returns with an empty folder, continues at once, and the earlier one ends.
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
    """An attempt's claim on `storage`. All public methods raise StorageError."""

    def __init__(self, storage: Storage, *, folder: Path, attempt: str, agents: list[str]):
        self.storage, self.agents, self.token = storage, agents, 0
        self._marker: dict[str, Any] = {"folder": str(folder.absolute()), "host": socket.gethostname()}
        self._marker |= {"attempt": attempt, "agents": agents}

    def claim(self, before: Attempt) -> None:
        """Take over the storage, and print so if another run owned it. `before`: the previous attempt in this folder.

        Raises:
            Lost: this launch owned the storage, and another run has taken it over since.
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
        """Raise Lost if another attempt has taken over the storage. If all markers were deleted, none has."""
        token, holder = self.newest()
        if token and holder != self._marker:
            raise self._lost(holder)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return the largest token and its marker: (0, {}) if there is none, (token, {}) if the marker is damaged."""
        token = max(self._tokens(), default=0)
        if not token:
            return 0, {}
        try:
            return token, self.storage.patiently(_file(token), lambda: self._read(token))
        except Damaged:
            if max(self._tokens(), default=0) != token:  # another attempt has just replaced it
                return self.newest()
            return token, {}

    def _create(self, token: int) -> bool:
        """Create the marker; return True if this attempt owns it.

        Reads the newest marker again: a slow attempt may create a number that others have already passed and cleared.
        """
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
        """Return True if the marker belongs, as far as is known, to no earlier attempt at this run."""
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
