"""The commit of backends that create a file atomically: files stay in place, and creating the manifest is the commit."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from muster.checkpoint.backends.base import MANIFEST, OLD, Backend, name, steps_of


class CommitByManifest(Backend):
    """Commits the draft `step-NNNNNNNN/ATTEMPT/` by `step-NNNNNNNN/manifest.json`, which names the files in the draft.

    A checkpoint is withdrawn by renaming its manifest to `step-NNNNNNNN/WORD-TIME-manifest.json`.
    """

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file. It need not be atomic: if the process is killed, both names may be left, but never none."""

    def draft(self, name: str, attempt: str) -> str:
        return f"{name}/{attempt}"

    def place(self, file: str, attempt: str) -> str:
        return f"{attempt}/{file}"

    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        self.create(f"{name}/{MANIFEST}", manifest)

    def committed(self) -> Sequence[int]:
        return [step for step in steps_of(self.list()) if MANIFEST in self.list(name(step))]

    def withdraw(self, name: str, word: str) -> str:
        folder, _, file = name.partition("/")
        aside = f"{folder}/{word}-{time.time_ns()}-{MANIFEST}"
        self.rename(f"{folder}/{file or MANIFEST}", aside)
        return aside

    def withdrawn(self, word: str) -> Sequence[str]:
        folders = [name(step) for step in steps_of(self.list())]
        return [f"{at}/{file}" for at in folders for file in self.list(at) if file.startswith(f"{word}-")]

    def remove(self, name: str, manifest: Callable[[], dict[str, Any]]) -> None:
        files = f"{name}/{manifest()['attempt']}"  # withdrawn checkpoints may share the step's folder
        self.delete(self.withdraw(name, OLD))
        self.delete(files)

    def clear(self) -> None:
        """Delete nothing: a killed writer's manifest may still be on its way to the server."""

    def clear_drafts(self, newest: int) -> None:
        for step in steps_of(self.list()):
            if step <= newest and not self._is_named(step):
                self.delete(name(step))

    def _is_named(self, step: int) -> bool:
        """Return True if the step's folder has a manifest, committed or withdrawn, that names its files."""
        return any(file.endswith(MANIFEST) and not file.startswith(OLD) for file in self.list(name(step)))
