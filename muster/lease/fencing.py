"""Exclusive claims on a place that several attempts may want to write to: a run's folder, a checkpoint storage.

An attempt claims the place with an entry whose number, the token, is one more than the largest token so far. The entry
is created with all its content in one step, and only if it does not exist, so one of several simultaneous claims wins.
Tokens only grow: an attempt that finds a larger token than its own has been superseded.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from muster import outcome
from muster.checkpoint.commit import Storage
from muster.checkpoint.schemas import read_marker
from muster.errors import Damaged
from muster.files import create_file


class Entries(Protocol):
    """The entries of a place, by token."""

    def tokens(self) -> list[int]:
        """Return the tokens of all entries, in any order."""

    def read(self, token: int) -> dict[str, Any]:
        """Return the content of an entry; `{}` if it cannot be read. Raises Damaged if it must be read again."""

    def create(self, token: int, content: Mapping[str, Any]) -> None:
        """Create an entry atomically. Raises FileExistsError if there is one with this token."""

    def delete(self, token: int) -> None:
        """Delete an entry, if it exists."""


class Claim:
    """One attempt's claim on a place. `token` is 0 until `take` succeeds. `content` identifies the attempt to others; JSON."""

    def __init__(self, entries: Entries, content: Mapping[str, Any]):
        self.entries, self.content, self.token = entries, content, 0

    def take(self, after: int) -> bool:
        """Claim the place with the token that follows `after`; return whether this attempt holds it now.

        Reads the newest entry again: a slow attempt may create a token that others have already passed and cleared.
        """
        token = after + 1
        try:
            self.entries.create(token, self.content)
        except FileExistsError:
            return False
        self.token = token
        found, holder = newest(self.entries)
        if found > token:
            self.entries.delete(token)
        return (found, holder) == (token, self.content)

    def is_newest(self) -> bool:
        """Return True if no other attempt has claimed the place since; False if that cannot be determined."""
        return newest(self.entries) == (self.token, self.content)

    def clear_older(self) -> None:
        for token in self.entries.tokens():
            if token < self.token:
                self.entries.delete(token)


def newest(entries: Entries) -> tuple[int, dict[str, Any]]:
    """Return the largest token and its entry: (0, {}) without entries, (token, {}) if the entry cannot be read."""
    while token := max(entries.tokens(), default=0):
        try:
            return token, entries.read(token)
        except Damaged:
            if max(entries.tokens(), default=0) == token:  # otherwise another attempt has just replaced it
                return token, {}
    return 0, {}


class FolderEntries:
    """Entries `.claim-N` in a run's folder on a POSIX file system. `create` raises OSError, `tokens` and `read` do not."""

    NAME = re.compile(r"\.claim-([0-9]{1,18})$")

    def __init__(self, folder: Path):
        self.folder = folder

    def tokens(self) -> list[int]:
        try:
            return [int(match[1]) for path in self.folder.iterdir() if (match := self.NAME.fullmatch(path.name))]
        except OSError:
            return []

    def read(self, token: int) -> dict[str, Any]:
        """Values of a wrong type are left out; a holder without its values counts as a stranger."""
        return outcome.read_record(self._path(token))

    def create(self, token: int, content: Mapping[str, Any]) -> None:
        create_file(self._path(token), json.dumps(content).encode())

    def delete(self, token: int) -> None:
        """A failure leaves the file there, superseded."""
        with contextlib.suppress(OSError):
            self._path(token).unlink()

    def _path(self, token: int) -> Path:
        return self.folder / f".claim-{token}"


class StorageEntries:
    """Markers `owner-N.json` at the root of a checkpoint storage. All methods raise StorageError."""

    NAME = re.compile(r"owner-([0-9]{8,18})\.json")

    def __init__(self, storage: Storage):
        self.storage = storage

    def tokens(self) -> list[int]:
        with self.storage.doing("list"):
            return [int(match[1]) for each in self.storage.backend.list() if (match := self.NAME.fullmatch(each))]

    def read(self, token: int) -> dict[str, Any]:
        """Raises Damaged: it is missing or malformed."""
        return self.storage.patiently(self._file(token), lambda: self._get(token))

    def create(self, token: int, content: Mapping[str, Any]) -> None:
        with self.storage.doing("claim", FileExistsError):
            self.storage.backend.create(self._file(token), json.dumps(content).encode())

    def delete(self, token: int) -> None:
        with self.storage.doing("clear"):
            self.storage.backend.delete(self._file(token))

    def _get(self, token: int) -> dict[str, Any]:
        with self.storage.backend.get(self._file(token)) as file:
            return read_marker(file.read())

    @staticmethod
    def _file(token: int) -> str:
        return f"owner-{token:08d}.json"
