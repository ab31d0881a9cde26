"""The seam between the checkpoint protocol and the places where checkpoints lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

MANIFEST = "manifest.json"


class Unsure(Exception):
    """`create` or `publish` failed in a way that leaves open whether the file or the checkpoint is there."""


class Backend(ABC):
    """Named files (`step-00000010/rank-00000.bin`), and one act that makes some of them a checkpoint.

    Methods raise what the place's own client raises, and FileNotFoundError for a file that is not there.
    """

    root: str
    """The place, for people."""
    renames: bool
    """Whether `publish` moves a draft's files to the checkpoint's name (a folder) or they stay (an object store)."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the place, before a run first writes there."""

    @abstractmethod
    def put(self, name: str) -> AbstractContextManager[Any]:
        """A stream to write a file of a draft; the file lasts when the context has ended well."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all, unless there is one of this name.

        Raises:
            FileExistsError: there is one, with other content.
            Unsure: it may have been written.
        """

    @abstractmethod
    def get(self, name: str) -> AbstractContextManager[Any]:
        """A binary stream to read a file, which can seek."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """The names in `folder`, of files and folders; none if it is not there."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if it is not there."""

    @abstractmethod
    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        """Make `draft` the checkpoint `name` with `manifest`, whole or not at all, and never over another.

        Raises:
            FileExistsError: there is another checkpoint of this name.
            Unsure: it may have been published.
        """

    @abstractmethod
    def withdraw(self, name: str, word: str) -> str:
        """Undo `publish` in one act and lose nothing: `name` (or what `withdraw` gave) gets a name that begins with `word`.

        In an object store it is the manifest that gets the new name, in the folder where it was.
        """
