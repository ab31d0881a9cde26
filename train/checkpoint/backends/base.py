"""Interface between the commit protocol and the storage of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

MANIFEST = "manifest.json"


class Unsure(Exception):
    """`create` or `publish` failed, and it is unknown whether the file or the checkpoint exists."""


class Backend(ABC):
    """Storage of named files (`step-00000010/rank-00000.bin`), with an atomic commit of a draft as a checkpoint.

    Methods raise the exceptions of the storage's own client, and FileNotFoundError for a missing file.
    """

    root: str
    """Location of the storage, for display."""
    renames: bool
    """True if `publish` renames a draft to the checkpoint's name (a folder), False if files stay (an object store)."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the location, before a run first writes there."""

    @abstractmethod
    def put(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager with a stream to write a draft's file; the file is durable after a clean exit."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file atomically, unless a file of this name exists.

        Raises:
            FileExistsError: the file exists, with other content.
            Unsure: the file may have been written.
        """

    @abstractmethod
    def get(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager with a seekable binary stream to read a file."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the names of files and folders in `folder`; an empty list if it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content; does nothing if it does not exist."""

    @abstractmethod
    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        """Commit `draft` atomically as the checkpoint `name` with `manifest`; never overwrite another.

        Raises:
            FileExistsError: there is another checkpoint of this name.
            Unsure: the checkpoint may have been published.
        """

    @abstractmethod
    def withdraw(self, name: str, word: str) -> str:
        """Undo `publish` in one step and keep all files: rename `name` (or an earlier result) to begin with `word`.

        Returns the new name. In an object store only the manifest is renamed, within its folder.
        """
