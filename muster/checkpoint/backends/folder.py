"""Checkpoints in a POSIX folder: each has a folder `step-NNNNNNNN/` with the ranks' files, the index and the manifest."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.checkpoint.backends.base import MANIFEST
from muster.checkpoint.backends.by_rename import CommitByRename
from muster.files import create_file, sync_folder


class Directory(CommitByRename):
    def __init__(self, folder: Path):
        self.folder, self.root = folder, str(folder)

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def put(self, name: str) -> Iterator[Any]:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)  # not its parents: a run's folder that was deleted must not be recreated
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def create(self, name: str, data: bytes) -> None:
        create_file(self.folder / name, data)

    def get(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return (self.folder / name).open("rb")

    def list(self, folder: str = "") -> list[str]:
        place = self.folder / folder
        return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def delete(self, name: str) -> None:
        path = self.folder / name
        if path.is_symlink() or path.is_file():  # delete a link only, not its target
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        if (self.folder / name).exists():
            raise FileExistsError(f"{self.folder / name} exists")
        with self.put(f"{draft}/{MANIFEST}") as file:
            file.write(manifest)
        sync_folder(self.folder / draft)
        self.rename(draft, name)
        sync_folder(self.folder)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.folder / old, self.folder / new)
