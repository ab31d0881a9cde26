"""Checkpoints that are either whole or not there, written while training goes on.

`state` holds model, optimizer and scaler, one `rank-NNNNN` a rank its random number generators and what else only that
rank knows, and the manifest the position with sizes and SHA-256 of all files. Each rank writes its own part, then rank
0 commits; storage/ says how.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import DistError

from train.checkpoint.backends import Files, Storage, name
from train.dist.world import World
from train.errors import Damaged, NoValidCheckpoint, StorageError
from train.faults import attempts as outcome
from train.faults.phase import LONG_S

FAILURES_ALLOWED = 3
OTHERS_S = 30.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that verified: where it lies, and its manifest."""

    storage: Storage
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def path(self) -> str:
        return self.storage.path(self.step)


class Checkpoints:
    """The checkpoints of one run: written behind the training's back, one at a time, the newest `keep` kept."""

    def __init__(
        self,
        storage: Storage,
        *,
        folder: Path,
        world: World,
        keep: int,
        on_commit: Callable[[dict[str, Any]], None] = lambda _: None,
    ):
        self.storage, self.folder, self.world, self.keep, self.on_commit = storage, folder, world, keep, on_commit
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
        step, rank, attempt = int(position["step"]), self.world.rank, self.world.attempt
        board, save = self.world.board, self._saves
        started = time.perf_counter()
        try:
            files = self.storage.write(step, attempt, part(rank), own)
            if shared is not None:
                files |= self.storage.write(step, attempt, "state", shared)
            board.post_part(save, {"files": files})
            if rank == 0:
                self._commit(position, started)
                board.end_save(save, None)
            elif failed := board.save_end(save, LONG_S):
                raise StorageError(failed)
            self._failures.clear()
            self.newest_step = step
        except StorageError as error:
            self._give_up(step, error)
        except RuntimeError as error:  # the store is gone, and with it the group
            reason, gone = str(error).splitlines()[0], isinstance(error, DistError)
            failure = StorageError(f"checkpoint {name(step)} was not finished: {reason}")
            self._give_up(step, failure, say_so=not gone)
        except BaseException as error:  # nothing that ends this thread may end it unseen
            traceback.print_exc()
            self._give_up(step, StorageError(f"cannot write checkpoint {name(step)}: {error!r}"))

    def _commit(self, position: dict[str, Any], started: float) -> None:
        """Rank 0: wait for every rank's files, make them a checkpoint, drop old ones."""
        step, attempt = int(position["step"]), self.world.attempt
        files: Files = {}
        for said in self.world.board.parts(self._saves, LONG_S):
            if said.get("failed"):
                raise StorageError(said["failed"])
            files |= said["files"]
        if not outcome.is_latest(self.folder, attempt):
            raise StorageError(f"{name(step)} is not written: another attempt has taken this run over")
        manifest = {
            "format": 1,
            **position,
            "world_size": self.world.size,
            "attempt": attempt,
            "torch": torch.__version__,
            "files": files,
        }
        if not self.storage.commit(step, attempt, manifest):
            return  # an attempt that was cut off got so far too; a step is never written twice
        self.on_commit(
            {
                "step": step,
                "path": self.storage.path(step),
                "bytes": sum(file["size"] for file in files.values()),
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        for old in self.storage.steps()[self.keep :]:
            self.storage.remove(old)

    def _give_up(self, step: int, error: StorageError, *, say_so: bool = True) -> None:
        self._failures.append(error)
        board, save = self.world.board, self._saves
        with contextlib.suppress(RuntimeError):
            if say_so:
                board.post_part(save, {"failed": str(error)})
                if self.world.is_first:  # whoever still writes would bring the draft back
                    board.parts(save, OTHERS_S)
        if self.world.is_first:
            self.storage.abandon(step, self.world.attempt)
            with contextlib.suppress(RuntimeError):
                if say_so:
                    board.end_save(save, str(error))
            self.on_commit({"failed": str(error), "failures_in_a_row": len(self._failures)})


def newest(storage: Storage, *, on_bad: Callable[[str], None], own: bool = True) -> Saved | None:
    """The newest checkpoint that verifies; bad ones are put aside in a run's `own` storage. None if there never was one.

    Raises:
        StorageError: one cannot be read, which does not make it a bad one.
        NoValidCheckpoint: there are or were checkpoints, and none is valid. Never a silent start from zero.
    """
    bad = storage.bad()
    for step in storage.steps():
        try:
            return Saved(storage, storage.verify(step))
        except Damaged as error:
            on_bad(str(error))
        bad.append(storage.put_aside(step) if own else name(step))
    if bad:
        raise NoValidCheckpoint(
            f"no valid checkpoint in {storage.root} ({len(bad)} bad, newest {bad[-1]}): restore one, or start over with checkpoint.resume=never"
        )
    return None


def read(saved: Saved, *, world: World) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The shared state, and this rank's own if the world size is the same."""
    state: dict[str, Any] = saved.storage.read(saved.step, "state", saved.manifest)
    if saved.manifest["world_size"] != world.size:
        return state, None
    return state, saved.storage.read(saved.step, part(world.rank), saved.manifest)


def part(rank: int) -> str:
    """The name of what one rank alone knows."""
    return f"rank-{rank:05d}"


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


def _copy(value: Any) -> Any:
    """A deep copy in host memory, so that training may go on while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(_copy(item) for item in value) if isinstance(value, (list, tuple)) else value
