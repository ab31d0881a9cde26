"""Checkpoints in a POSIX folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.backends.base import MANIFEST, STEP, Files, Hashing, Storage, name
from train.errors import storage_error
from train.files import sync_folder


class Folder(Storage):
    """A POSIX folder: `step-NNNNNNNN/` with `state.pt`, a `rank-NNNNN.pt` for each rank and the manifest."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, str(folder)

    def prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            raise storage_error("use output_dir:", error) from error

    def write(self, step: int, attempt: str, part: str, value: Any) -> Files:
        draft = self._draft(step, attempt)
        try:
            draft.mkdir(parents=True, exist_ok=True)
            return {f"{part}.pt": write_tensors(draft / f"{part}.pt", value)}
        except OSError as error:
            raise storage_error(f"write checkpoint {name(step)}:", error) from error
        except RuntimeError as error:  # torch.save hides the system's error in one of its own
            cause = error.__context__ if isinstance(error.__context__, OSError) else None
            if cause is None:
                raise
            raise storage_error(f"write checkpoint {name(step)}:", cause) from error

    def commit(self, step: int, attempt: str, manifest: dict[str, Any]) -> bool:
        draft, final = self._draft(step, attempt), self.folder / name(step)
        try:
            if final.exists():
                self.verify(step)
                shutil.rmtree(draft)
                return False
            with (draft / MANIFEST).open("w") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(draft)
            os.rename(draft, final)
            sync_folder(self.folder)
        except OSError as error:
            raise storage_error(f"write checkpoint {name(step)}:", error) from error
        return True

    def abandon(self, step: int, attempt: str) -> None:
        shutil.rmtree(self._draft(step, attempt), ignore_errors=True)

    def steps(self) -> list[int]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted((int(match[1]) for text in names if (match := STEP.fullmatch(text))), reverse=True)

    def bad(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("bad-step-*")) if self.folder.is_dir() else []

    def open(self, step: int, file: str) -> contextlib.AbstractContextManager[Any]:
        return (self.folder / name(step) / file).open("rb")

    def size(self, step: int, file: str) -> int:
        return (self.folder / name(step) / file).stat().st_size

    def read(self, step: int, part: str, manifest: dict[str, Any]) -> Any:
        return torch.load(self.folder / name(step) / f"{part}.pt", map_location="cpu", weights_only=True)

    def put_aside(self, step: int, word: str = "bad") -> str:
        aside = f"{word}-{name(step)}.{time.time_ns()}"
        try:
            os.rename(self.folder / name(step), self.folder / aside)
        except OSError as error:
            raise storage_error(f"put {self.path(step)} aside:", error) from error
        return aside

    def remove(self, step: int) -> None:
        doomed = self.folder / f".{name(step)}.old"
        with contextlib.suppress(OSError):
            os.rename(self.folder / name(step), doomed)  # no half-removed folder is ever taken for a checkpoint
        shutil.rmtree(doomed, ignore_errors=True)

    def start_over(self) -> None:
        aside = self.folder / f"previous-{time.time_ns()}"
        try:
            aside.mkdir(parents=True)
            for each in (*map(name, self.steps()), *self.bad()):
                (self.folder / each).rename(aside / each)
        except OSError as error:
            raise storage_error("set the earlier run aside:", error) from error

    def _draft(self, step: int, attempt: str) -> Path:
        return self.folder / f".{name(step)}.{attempt}"


def write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """torch.save to a synced file; its size and SHA-256, taken of what was meant to be written."""
    with path.open("wb") as file:
        hashing = Hashing(file)
        torch.save(value, hashing)
        file.flush()
        os.fsync(file.fileno())
    return hashing.facts
