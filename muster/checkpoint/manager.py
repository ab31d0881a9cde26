"""Asynchronous saving of checkpoints, and the search for the one to resume from.

Every rank copies its share of the state and writes the copy in the background; rank 0 then commits. commit.py is the
commit protocol; state.py divides the state among the ranks.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import DistError, DistNetworkError

from muster import outcome
from muster.checkpoint.backends.base import name
from muster.checkpoint.commit import Files, Lost, Saved, Storage, Unclear, place_of
from muster.checkpoint.schemas import BEST, INDEX, read_best
from muster.checkpoint.state import RankShare, Shares, file_of, read, saved_tensors
from muster.checkpoint.trained import Trained, own_prefix
from muster.checkpoint.weights import unreadable
from muster.errors import (
    ConfigError,
    Damaged,
    Diverged,
    MusterError,
    NoValidCheckpoint,
    StorageError,
    say,
    traceback_of,
)
from muster.faults.phase import LONG_S
from muster.files import replace_file
from muster.redact import without
from muster.world.group import World, alone

FAILURES_ALLOWED = 3
OTHERS_S = 30.0
OF_STATE = (ConfigError, Diverged)
"""Errors of what is saved, and not of where: the next checkpoint would fail, too."""


class Checkpoints:
    """The checkpoints of one run, written in the background one at a time; the newest `keep` are kept."""

    def __init__(
        self,
        storage: Storage,
        *,
        folder: Path,
        world: World,
        keep: int,
        facts: dict[str, Any],
        newest_step: int | None = None,
        may_commit: Callable[[], bool] = lambda: True,
        on_commit: Callable[[dict[str, Any]], None] = lambda _: None,
    ):
        self.storage, self.folder, self.world, self.keep, self.facts = storage, folder, world, keep, facts
        self.may_commit, self.on_commit, self.newest_step = may_commit, on_commit, newest_step
        self._shares = Shares(world)
        self._writer: threading.Thread | None = None
        self._failures: list[MusterError] = []
        self._broken: RuntimeError | None = None
        self._saves = 0  # the same on every rank: it matches the ranks' writers on the board
        self._writing: int | None = None
        self._failed = set[int]()
        self.best: dict[str, Any] | None = None
        """The best evaluation whose checkpoint is committed, as far as this attempt knows."""

    def save(self, *, state: dict[str, Any], position: dict[str, Any], finite: Collection[str] = ()) -> None:
        """Copy this rank's share of `state` and write it in the background, after waiting for the previous save. Collective.

        `state`: the state that this rank owns or replicates; see strategies/base.py. `position`: facts for the manifest, at least
        `step`. `finite`: tensors of `state` that must be finite, or nothing is committed. The writer checks its copy, so that
        training, and a GPU, need not wait for it.

        Raises Diverged: a tensor that must be finite was not, in the checkpoint before. Raises ConfigError: it had a value that
        would not be read again. Raises StorageError: the last three checkpoints could not be written, or the run's folder or its
        storage is lost.
        """
        self.wait()
        if self.world.sum([float(position["step"] != self.newest_step)]) == [0.0]:
            if (best := position.get("best")) and best["step"] == position["step"]:  # evaluated after it was saved
                self.best = best
                self.world.on_first(partial(self.note_best, best))
            return
        self._saves += 1
        self._writing = int(position["step"])
        share = self._shares.divide({**state, f"{own_prefix(self.world.rank)}rng": rng_state()}, finite=finite)
        self._writer = threading.Thread(target=self._write, args=(share, position), name="checkpoint")
        self._writer.start()

    def save_alone(self, *, state: dict[str, Any], position: dict[str, Any]) -> None:
        """Write and commit a checkpoint of a replicated `state` on this rank alone, as other ranks are gone.

        A newest checkpoint of the same step is left as it is. Raises ConfigError, StorageError as `wait` does.
        """
        step, started = int(position["step"]), time.perf_counter()
        if step == self.newest_step:
            return
        draft = f"{self.world.attempt}-{self.world.rank}"  # the ranks may have begun a draft of this step together
        shares = Shares(alone(self.world.device))
        share = shares.divide(state)
        try:
            files = self._write_files(step, draft, {file_of(0): share.pieces(), INDEX: [_as_json(shares.index)]})
            self._commit(files, position, started, draft=draft)
        except (StorageError, *OF_STATE):
            self.storage.abandon(step, draft)
            raise
        self.newest_step = step

    def wait(self) -> None:
        """Wait until the checkpoint being written is committed or has failed.

        Raises ConfigError, Diverged, StorageError as `save` does. Raises DistBackendError: a rank has died meanwhile, and is restarted in
        place; the checkpoint is given up. Raises DistNetworkError: the rendezvous store is gone, and the process group with it.
        """
        if self._writer:
            self._writer.join()
            self._writer = None
        if self._broken:
            raise self._broken
        if len(self._failures) >= FAILURES_ALLOWED or any(
            isinstance(each, (Lost, *OF_STATE)) for each in self._failures
        ):
            raise self._failures[-1]

    def has_failed(self, step: int) -> bool:
        """Return whether the checkpoint of `step` could not be written, after waiting for it; the same on every rank.

        Raises as `wait` does.
        """
        if self._writing == step:
            self.wait()
        return step in self._failed

    def settle(self, seconds: float) -> None:
        """Wait up to `seconds` for the checkpoint being written, before the run ends for another reason."""
        if self._writer:
            self._writer.join(timeout=seconds)

    def give_up(self) -> bool:
        """Wait a while for the checkpoint being written; return True if it is given up, because a rank has died."""
        self.settle(OTHERS_S)
        return self._broken is not None or bool(self._writer and self._writer.is_alive())

    def flush(self) -> None:
        """Wait for the last checkpoint of a run, and raise ConfigError, Diverged or StorageError if it failed."""
        self.wait()
        if self._failures:
            raise self._failures[-1]

    def _write(self, share: RankShare, position: dict[str, Any]) -> None:
        step, number, started = int(position["step"]), self._saves, time.perf_counter()
        try:
            self.world.store_keys.post_part(number, {"files": self._write_share(step, share)})
            if self.world.is_first:
                self._commit(self._gather(number), position, started, draft=self.world.attempt)
                self.world.store_keys.end_save(number, {})
            else:
                self._await_end(number)
            self._failures.clear()
            self._failed.discard(step)
            self.newest_step = step
            if (best := position.get("best")) and best["step"] not in self._failed:
                self.best = best
        except (StorageError, *OF_STATE) as error:
            self._give_up(number, step, error)
        except RuntimeError as error:
            # Without the store there is no process group either: the storage has not failed.
            if self._is_one_lost() or isinstance(error, DistNetworkError):
                self._broken = error
                if self.world.is_first:
                    self.storage.abandon(step, self.world.attempt)
            else:
                failure = StorageError(f"checkpoint {name(step)} is incomplete: {str(error).splitlines()[0]}")
                self._give_up(number, step, failure, alone=isinstance(error, DistError))
        except BaseException as error:  # no error may end this thread unreported
            say(traceback_of(error))
            self._give_up(number, step, StorageError(f"cannot write checkpoint {name(step)}: {error!r}"))

    def _write_share(self, step: int, share: RankShare) -> Files:
        contents: dict[str, Iterable[Any]] = {file_of(self.world.rank): share.pieces()}
        if self.world.is_first:
            contents[INDEX] = [_as_json(self._shares.index)]
        try:
            return self._write_files(step, self.world.attempt, contents)
        except OF_STATE as error:
            raise type(error)(f"{name(step)} is not saved: {error}") from None

    def _write_files(self, step: int, draft: str, contents: Mapping[str, Iterable[Any]]) -> Files:
        files: Files = {}
        for file, pieces in contents.items():
            with self.storage.write(step, draft, file) as stream:
                for piece in pieces:
                    stream.write(piece)
            files[file] = stream.facts
        return files

    def _commit(self, files: Files, position: dict[str, Any], started: float, *, draft: str) -> None:
        """One rank only."""
        step = int(position["step"])
        self._see_folder()
        if not self.may_commit():
            raise StorageError(f"{name(step)} is not saved: another attempt has taken over this run")
        facts = {"world_size": self.world.size, "attempt": draft, "torch": torch.__version__}
        if not self.storage.commit(step, draft, {**position, **self.facts, **facts}, files):
            return  # an earlier attempt, then cut off, committed this step; a step is never written twice
        outcome.note_commit(self.folder, self.world.attempt, step=step, path=self.storage.path(step))
        best = position.get("best")
        if best and best["step"] in self._failed - {step}:  # its weights are gone
            best = None
        if best:
            self.note_best(best)
        self.on_commit(
            {
                "step": step,
                "path": self.storage.path(step),
                "bytes": sum(file["size"] for file in files.values()),
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        try:
            self.storage.prune(keep=self.keep, spare=best["step"] if best else self._step_of_best())
        except StorageError as error:
            say(f"muster: {name(step)} is saved, but older checkpoints could not be deleted: {error}")

    def note_best(self, best: dict[str, Any]) -> None:
        """Write the best evaluation and its checkpoint's path to best.json in the run's folder. Rank 0 only."""
        facts = {**best, "path": self.storage.path(best["step"])}
        replace_file(self.folder / BEST, lambda draft: draft.write_text(json.dumps(facts), encoding="utf-8"))

    def _step_of_best(self) -> int | None:
        """best.json may be of an earlier attempt: this one may not look for a best checkpoint, or have found none yet."""
        noted = read_best(self.folder)
        return noted.step if noted else None

    def _see_folder(self) -> None:
        if not (self.folder / "outcome.json").exists():
            raise Lost(f"the run's folder {self.folder} no longer exists: restore it, then run again")

    def _gather(self, number: int) -> Files:
        files: Files = {}
        for said in self.world.store_keys.parts(number, LONG_S):
            if said.get("failed"):
                raise _failure(said)
            files |= said["files"]
        return files

    def _await_end(self, number: int) -> None:
        said = self.world.store_keys.save_end(number, LONG_S)
        if said.get("failed"):
            raise _failure(said)

    def _is_one_lost(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return self.world.store_keys.is_one_lost()
        return False

    def _give_up(self, number: int, step: int, error: MusterError, *, alone: bool = False) -> None:
        try:
            self._see_folder()
        except Lost as lost:
            error = lost
        self._failures.append(error)
        self._failed.add(step)
        store_keys = self.world.store_keys
        with contextlib.suppress(RuntimeError):
            if not alone:
                store_keys.post_part(number, _said(error))
                if self.world.is_first:  # wait for the others: a rank still writing would recreate the draft
                    store_keys.parts(number, OTHERS_S)
        if self.world.is_first:
            if not isinstance(error, Unclear):
                self.storage.abandon(step, self.world.attempt)
            with contextlib.suppress(RuntimeError):
                if not alone:
                    store_keys.end_save(number, _said(error))
            self.on_commit({"failed": str(error), "failures_in_a_row": len(self._failures)})


def _said(error: MusterError) -> dict[str, Any]:
    return {"failed": str(error), "kind": type(error).__name__}


def _failure(said: dict[str, Any]) -> MusterError:
    kinds = {kind.__name__: kind for kind in (Lost, *OF_STATE)}
    return kinds.get(said.get("kind", ""), StorageError)(said["failed"])


def newest(storage: Storage, world: World, *, on_bad: Callable[[str], None], own: bool = True) -> Saved | None:
    """Return the newest checkpoint that passes verification; None if there never was one. Collective.

    Bad checkpoints are passed to `on_bad` and, in the run's `own` storage, quarantined.

    Raises StorageError: a checkpoint cannot be read; it is not treated as bad. Raises NoValidCheckpoint: checkpoints exist or
    existed, and none is valid; the run never silently starts from zero.
    """
    steps, bad = world.on_first(lambda: [storage.steps(), storage.bad()])
    for step in steps:
        try:
            return verify(storage, step, world)
        except Damaged as error:
            on_bad(str(error))
        bad.append(world.on_first(partial(storage.withdraw, step)) if own else name(step))
    if bad:
        raise NoValidCheckpoint(
            f"no valid checkpoint in {storage.root} ({len(bad)} bad, newest {bad[-1]}): restore one, or start over with checkpoint.resume=never"
        )
    return None


def verify(storage: Storage, step: int, world: World) -> Saved:
    """Compare every file of a checkpoint with its manifest, in parallel over the ranks, and return the checkpoint. Collective.

    Raises Damaged on every rank, naming a damaged file and its damage. Raises StorageError: a file cannot be read.
    """
    found = world.on_first(lambda: _manifest(storage, step))
    if isinstance(found, str):
        raise Damaged(found)
    damage, failure = "", None
    for number, (file, expected) in enumerate(found["files"].items()):
        try:
            if number % world.size == world.rank:
                storage.compare(step, file, expected)
        except Damaged as error:
            damage = damage or str(error)
        except MusterError as error:
            failure = error
            break
    world.together(failure)
    if damaged := next(filter(None, world.gather(damage)), None):
        raise Damaged(damaged)
    return Saved(storage, found)


def restore(saved: Saved, trained: Trained) -> None:
    """Restore `trained` and the random number generators; each rank reads only the bytes that it needs. Collective.

    Raises ConfigError: the checkpoint is of another model or optimizer. Raises StorageError: it cannot be read.
    """
    world = trained.world
    index = saved.index()
    own = own_prefix(world.rank) if saved.manifest["world_size"] == world.size else None
    names = [
        name
        for name in (*index["tensors"], *index["values"])
        if not name.startswith("rank-") or (own and name.startswith(own))
    ]
    tensors = saved_tensors(index, names)
    failure, values, targets = None, dict[str, Any](), trained.targets(tensors)
    try:
        values = read(index, names, targets, saved.open)
    except MusterError as error:
        failure = error
    except Exception as error:
        reason = without(unreadable(error), saved.storage.backend.root)[:300]
        failure = StorageError(f"cannot read {saved.path}: {reason}; fix the cause, then run again")
    world.together(failure)
    rng = values.pop(f"{own}rng", None)
    trained.load({**targets, **values})
    if rng:
        set_rng_state(rng)


def rng_state() -> dict[str, Any]:
    """Return the state of every random number generator of this process, as tensors and plain values."""
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


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _manifest(storage: Storage, step: int) -> dict[str, Any] | str:
    """Return the manifest, or as a string the damage to it or to the index that it names."""
    try:
        manifest = storage.manifest(step)
        if place_of(INDEX, manifest):
            storage.index(step, manifest)
        return manifest
    except Damaged as error:
        return str(error)
