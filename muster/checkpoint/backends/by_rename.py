"""The commit of backends that rename a folder atomically: a draft is a hidden folder, and its rename is the commit."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from muster.checkpoint.backends.base import OLD, Backend, steps_of
from muster.files import DRAFT


class CommitByRename(Backend):
    """Commits the draft `.step-NNNNNNNN.ATTEMPT/` as `step-NNNNNNNN/`; withdraws it as `WORD-step-NNNNNNNN.TIME/`.

    Subclasses implement `publish`, which writes the manifest into the draft before the rename.
    """

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a folder atomically."""

    def draft(self, name: str, attempt: str) -> str:
        return f".{name}.{attempt}"

    def place(self, file: str, attempt: str) -> str:
        return file

    def committed(self) -> Sequence[int]:
        return steps_of(self.list())

    def withdraw(self, name: str, word: str) -> str:
        aside = f"{word}-{name}.{time.time_ns()}"
        self.rename(name, aside)
        return aside

    def withdrawn(self, word: str) -> Sequence[str]:
        return [each for each in self.list() if each.startswith(f"{word}-step-")]

    def remove(self, name: str, manifest: Callable[[], dict[str, Any]]) -> None:
        self.delete(self.withdraw(name, OLD))

    def clear(self) -> None:
        for each in self.list():
            if each.startswith((".step-", f"{OLD}-step-", DRAFT)):
                self.delete(each)

    def clear_drafts(self, newest: int) -> None:
        """Delete nothing: drafts lie outside of the checkpoints' folders, and `clear` deletes them."""
