"""Checkpoints that are either whole or not there.

`checkpoints/step-NNNNNNNN/` holds `state.pt` (model, optimizer, scaler), one `rank-NNNNN.pt` a rank (random number
generators and what else only that rank knows) and `manifest.json` (sizes and SHA-256 of them, and the position).
All of it is written into a temporary folder and synced, then one rename makes it a checkpoint. Torch reads a file
with flipped bits without a word, so digests are checked before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train import outcome
from train.errors import NoValidCheckpoint, StorageError, storage_error
from train.files import sync_folder
from train.world import World

STEP = re.compile(r"step-(\d{8,})$")
MANIFEST = "manifest.json"
FAILURES_ALLOWED = 3
RANK_WAIT_S = 600.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that verified: its folder and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class Checkpoints:
    """The checkpoints of one run: written behind the training's back, one at a time, the newest `keep` kept."""

    def __init__(
        self, folder: Path, *, world: World, keep: int, on_commit: Callable[[dict[str, Any]], None] = lambda _: None
    ):
        self.folder, self.world, self.keep, self.on_commit = folder, world, keep, on_commit
        self._writer: threading.Thread | None = None
        self._failures: list[StorageError] = []
        self.newest_step: int | None = None
        self._saves = 0  # the same on every rank: names the keys by which the ranks' writers find each other

    def save(self, *, state: dict[str, Any], rank_state: dict[str, Any], position: dict[str, Any]) -> None:
        """Copy the state and write it in the background. Waits for the checkpoint before it. Collective.

        Args:
            state: what rank 0 writes for all; other ranks' is ignored.
            rank_state: what this rank writes for itself.
            position: goes into the manifest; has at least `step`.

        Raises:
            StorageError: the last three checkpoints could not be written.
        """
        self.wait()
        self._saves += 1
        if position["step"] == self.newest_step:
            return
        shared = _copy(state) if self.world.is_first else None
        own = {**_copy(rank_state), "rng": rng_state()}
        self._writer = threading.Thread(target=self._write, args=(shared, own, position), name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until the checkpoint that is being written is committed or given up."""
        if self._writer:
            self._writer.join()
            self._writer = None
        if len(self._failures) >= FAILURES_ALLOWED:
            raise self._failures[-1]

    def settle(self, seconds: float) -> None:
        """Give the checkpoint that is being written a last chance, before the run ends for another reason."""
        if self._writer:
            self._writer.join(timeout=seconds)

    def flush(self) -> None:
        """Wait, and raise StorageError if the checkpoint was given up: for the last one of a run."""
        self.wait()
        if self._failures:
            raise self._failures[-1]

    def _write(self, shared: dict[str, Any] | None, own: dict[str, Any], position: dict[str, Any]) -> None:
        step, rank = int(position["step"]), self.world.rank
        name = f"step-{step:08d}"
        draft = self.folder / f".{name}.{self.world.attempt}"
        key = f"checkpoint/{self._saves}"
        started = time.perf_counter()
        store = self.world.store.clone() if self.world.size > 1 else self.world.store
        try:
            draft.mkdir(parents=True, exist_ok=True)
            files = {f"rank-{rank:05d}.pt": write_tensors(draft / f"rank-{rank:05d}.pt", own)}
            if shared is not None:
                files["state.pt"] = write_tensors(draft / "state.pt", shared)
            store.set(f"{key}/{rank}", json.dumps({"files": files}))
            if rank == 0:
                self._commit(store, draft, name, position, started)
                store.set(f"{key}/end", json.dumps({"failed": None}))
            else:
                self._await_end(store, key)
            self._failures.clear()
            self.newest_step = step
        except OSError as error:
            self._give_up(store, key, draft, storage_error(f"write checkpoint {name}:", error))
        except StorageError as error:
            self._give_up(store, key, draft, error)
        except RuntimeError as error:  # the store is gone, and with it the group
            self._give_up(
                None, key, draft, StorageError(f"checkpoint {name} was not finished: {str(error).splitlines()[0]}")
            )

    def _commit(self, store: Any, draft: Path, name: str, position: dict[str, Any], started: float) -> None:
        """Rank 0: wait for every rank's files, write the manifest, rename, sync the folder, drop old ones."""
        files: dict[str, dict[str, Any]] = {}
        for rank in range(self.world.size):
            key = f"checkpoint/{self._saves}/{rank}"
            store.wait([key], timedelta(seconds=RANK_WAIT_S))
            said = json.loads(store.get(key))
            if said.get("failed"):
                raise StorageError(said["failed"])
            files |= said["files"]
        final = self.folder / name
        if not outcome.is_latest(self.folder.parent, self.world.attempt):
            raise StorageError(f"{name} is not written: another attempt has taken this run over")
        if final.exists():  # an attempt that was cut off got so far too; a step is never written twice
            verify(final)
            shutil.rmtree(draft)
            return
        manifest = {
            "format": 1,
            **position,
            "world_size": self.world.size,
            "attempt": self.world.attempt,
            "torch": torch.__version__,
            "files": files,
        }
        with (draft / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(draft)
        os.rename(draft, final)
        sync_folder(self.folder)
        self.on_commit(
            {
                "step": position["step"],
                "path": str(final),
                "bytes": sum(f["size"] for f in files.values()),
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        for old in steps(self.folder)[self.keep :]:
            doomed = old.with_name(f".{old.name}.old")
            os.rename(old, doomed)  # so that no half-removed folder is ever taken for a checkpoint
            shutil.rmtree(doomed, ignore_errors=True)

    def _await_end(self, store: Any, key: str) -> None:
        store.wait([f"{key}/end"], timedelta(seconds=RANK_WAIT_S))
        failed = json.loads(store.get(f"{key}/end"))["failed"]
        if failed:
            raise StorageError(failed)

    def _give_up(self, store: Any, key: str, draft: Path, error: StorageError) -> None:
        self._failures.append(error)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"{key}/{self.world.rank}", json.dumps({"failed": str(error)}))
                if self.world.is_first:
                    store.set(f"{key}/end", json.dumps({"failed": str(error)}))
        if self.world.is_first:
            shutil.rmtree(draft, ignore_errors=True)
            self.on_commit({"failed": str(error), "failures_in_a_row": len(self._failures)})


def prepare(folder: Path) -> None:
    """Make the folder and clear away what killed writers left. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    except OSError as error:
        raise storage_error("use output_dir:", error) from error


def newest(folder: Path, *, on_bad: Callable[[Path, str], None]) -> Saved | None:
    """The newest checkpoint that verifies; bad ones are put aside as `bad-step-...`. None if there never was one.

    Raises:
        NoValidCheckpoint: there are or were checkpoints, and none is valid. Never a silent start from zero.
    """
    bad = sorted(path.name for path in folder.glob("bad-step-*")) if folder.is_dir() else []
    for candidate in steps(folder):
        try:
            return verify(candidate)
        except StorageError as error:
            reason = str(error)
        on_bad(candidate, reason)
        aside = candidate.with_name(f"bad-{candidate.name}.{time.time_ns()}")
        with contextlib.suppress(OSError):
            os.rename(candidate, aside)
        bad.append(aside.name)
    if bad:
        raise NoValidCheckpoint(
            f"no valid checkpoint in {folder} ({len(bad)} bad, newest {bad[-1]}): restore one, or start over with checkpoint.resume=never"
        )
    return None


def steps(folder: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def verify(folder: Path) -> Saved:
    """Read the manifest and check every file that it names. Raises StorageError, saying what is wrong."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                raise StorageError(f"{folder / name} has {size} bytes instead of {expected['size']}")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    raise StorageError(f"{folder / name} has changed since it was written: its SHA-256 differs")
        int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{folder / MANIFEST}: {error}") from error
    return Saved(folder, manifest)


def read(saved: Saved, *, world: World) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The shared state, and this rank's own if the world size is the same."""
    state = torch.load(saved.folder / "state.pt", map_location="cpu", weights_only=True)
    if saved.manifest["world_size"] != world.size:
        return state, None
    return state, torch.load(saved.folder / f"rank-{world.rank:05d}.pt", map_location="cpu", weights_only=True)


def rng_state() -> dict[str, Any]:
    """Every random number generator of this process, as tensors and plain values."""
    kind, words, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """torch.save to a synced file; its size and SHA-256, taken of what was meant to be written."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        torch.save(value, hashing)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.digest.hexdigest()}


class _Hashing:
    """A file that digests what passes through. torch.save writes from start to end."""

    def __init__(self, file: Any):
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        self.file.write(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()


def _copy(value: Any) -> Any:
    """A deep copy in host memory, so that training may go on while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(_copy(item) for item in value) if isinstance(value, (list, tuple)) else value
