"""Interface between the commit protocol and the storage of checkpoints."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

MANIFEST = "manifest.json"
STEP = re.compile(r"step-([0-9]{8,18})")
OLD = ".old"
"""First part of the name of a checkpoint that is being deleted."""


class Unsure(Exception):
    """`create` or `publish` failed, and it is unknown whether the file or the checkpoint exists."""


def name(step: int) -> str:
    """Return the name of a step's checkpoint, `step-00000010`."""
    return f"step-{step:08d}"


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps of the names that are a checkpoint's, in ascending order."""
    found = [(int(match[1]), each) for each in names if (match := STEP.fullmatch(each))]
    return sorted(step for step, each in found if each == name(step))


class Backend(ABC):
    """Storage of named files (`step-00000010/rank-00000.bin`), with an atomic commit of a draft as a checkpoint.

    A backend subclasses `CommitByRename` or `CommitByManifest`, which have all methods but those that access files; or
    this class, with a commit of its own. Methods raise the exceptions of the storage's own client, and
    FileNotFoundError for a missing file.
    """

    root: str
    """Location of the storage, as given: by it two storages are compared, and messages name it."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the location, before a run first writes there."""

    @abstractmethod
    def put(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager with a stream to write a draft's file; the file is durable after a clean exit."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file atomically, unless a file of this name exists.

        Raises FileExistsError: the file exists, with other content. Raises Unsure: the file may have been written.
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
    def draft(self, name: str, attempt: str) -> str:
        """Return the folder that `attempt` writes the files of checkpoint `name` to before their commit."""

    @abstractmethod
    def place(self, file: str, attempt: str) -> str:
        """Return the name that a draft's file has in the checkpoint, relative to the checkpoint's folder."""

    @abstractmethod
    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        """Commit `draft` atomically as the checkpoint `name` with `manifest`; never overwrite another.

        Raises FileExistsError: there is another checkpoint of this name. Raises Unsure: the checkpoint may have been published.
        """

    @abstractmethod
    def committed(self) -> Sequence[int]:
        """Return the steps of all committed checkpoints, in any order."""

    @abstractmethod
    def withdraw(self, name: str, word: str) -> str:
        """Rename `name`, or an earlier result, to begin with `word`; return the new name. Undoes `publish` in one step and keeps all files."""

    @abstractmethod
    def withdrawn(self, word: str) -> Sequence[str]:
        """Return the names that `withdraw` gave with this `word`, oldest step first."""

    @abstractmethod
    def remove(self, name: str, manifest: Callable[[], dict[str, Any]]) -> None:
        """Withdraw the checkpoint `name`, then delete it, so that a partial one is never visible.

        `manifest` reads its manifest; it may raise Damaged, on which nothing may have been deleted yet.
        """

    @abstractmethod
    def clear(self) -> None:
        """Delete drafts that killed writers left, if no draft can become a checkpoint any more. Only the owner of the storage calls it."""

    @abstractmethod
    def clear_drafts(self, newest: int) -> None:
        """Delete drafts of steps up to `newest`, a committed one, unless `clear` deletes them. Keeps withdrawn ones."""
