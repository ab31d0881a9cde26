"""The commit protocol of checkpoints, shared by all backends.

Files are first written to a draft, which is never read as a checkpoint; the backend then commits the draft in one step,
in its own way (backends/by_rename.py, backends/by_manifest.py). A writer killed before that leaves only a draft. The
manifest contains the size and SHA-256 of every file, and its own SHA-256, because torch reads a file with flipped bits
without an error.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from muster.checkpoint.backends import at
from muster.checkpoint.backends.base import MANIFEST, Backend, Unsure, name
from muster.checkpoint.schemas import INDEX, read_index, read_manifest, sealed
from muster.clock import SYSTEM, SystemClock
from muster.errors import Damaged, MusterError, StorageError
from muster.redact import know, redacted, without

FORMAT = 2
TRIES, PAUSE_S = 3, 1.0
SEEN_WITHIN_S = 10.0
T = TypeVar("T")
Files = dict[str, dict[str, Any]]
"""Name -> {"size": bytes, "sha256": hex digest}."""


class Unclear(StorageError):
    """The commit failed, but the checkpoint may exist."""


class Lost(StorageError):
    """The run has lost its folder or its storage; later saves would fail, too."""


class Storage:
    """The checkpoints of one run, by step. All methods raise StorageError.

    `place`: a folder's path, an fsspec URL, `package.module.Class://...` for a custom backend, or a backend.
    `clock`: measures the waits for files of other ranks and before retries.
    """

    def __init__(self, place: str | Backend, *, clock: SystemClock = SYSTEM):
        self.backend = _backend(place) if isinstance(place, str) else place
        know(self.backend.root)
        self.root, self.clock = redacted(self.backend.root), clock

    def path(self, step: int) -> str:
        """Return the location of the checkpoint of `step`, for display."""
        return f"{self.root}/{name(step)}"

    def prepare(self) -> None:
        with self.doing("use"):
            self.backend.prepare()

    def clear(self) -> None:
        """Remove drafts that killed writers left. Only the owner of the storage may call it."""
        with self.doing("use"):
            self.backend.clear()

    @contextlib.contextmanager
    def write(self, step: int, attempt: str, file: str) -> Iterator[Hashing]:
        """Open a file of a draft for sequential writing; after the block its `facts` are final."""
        draft = self.backend.draft(name(step), attempt)
        with self.doing(f"write {self.path(step)}"), self.backend.put(f"{draft}/{file}") as to:
            yield Hashing(to)

    def commit(self, step: int, attempt: str, manifest: dict[str, Any], files: Files) -> bool:
        """Commit the draft as a checkpoint. Return False if a valid one of this step exists, which is left unchanged.

        Raises StorageError: a file of the draft is not visible here, or the draft could not be published. Raises Unclear: the draft
        may have been published; it must not be removed.
        """
        draft = self.backend.draft(name(step), attempt)
        for file, facts in files.items():
            self._see(f"{draft}/{file}", facts["size"])
        placed = {self.backend.place(file, attempt): facts for file, facts in files.items()}
        whole = {"format": FORMAT, **manifest, "files": placed}
        with self.doing(f"write {self.path(step)}"):
            try:
                self.backend.publish(draft, name(step), sealed(whole))
            except FileExistsError:
                if self._is_whole(step):
                    self.backend.delete(draft)
                    return False
                self.withdraw(step)
                self.backend.publish(draft, name(step), sealed(whole))
        return True

    def abandon(self, step: int, attempt: str) -> None:
        with contextlib.suppress(Exception):
            self.backend.delete(self.backend.draft(name(step), attempt))

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, newest first."""
        with self.doing("list"):
            return sorted(self.backend.committed(), reverse=True)

    def bad(self) -> list[str]:
        """Return the names of quarantined checkpoints."""
        with self.doing("list"):
            return list(self.backend.withdrawn("bad"))

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest. Raises Damaged if it is missing or has changed, StorageError if it cannot be read."""
        manifest = self._record(step, MANIFEST, partial(read_manifest, step=step))
        if (given := manifest.get("format", 1)) != FORMAT:
            raise StorageError(
                f"{self.path(step)} has format {given}, and this version of the kit reads {FORMAT}: "
                "use the version that wrote it, or start over with checkpoint.resume=never"
            )
        return manifest

    def index(self, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
        """Read the index of the checkpoint with this manifest. Raises as `manifest` does."""
        place = place_of(INDEX, manifest)
        if place is None:
            raise Damaged(f"{self.path(step)}/{MANIFEST}: it lists no {INDEX}")
        return self._record(step, place, partial(read_index, manifest=manifest))

    def compare(self, step: int, file: str, expected: dict[str, Any]) -> None:
        """Compare a file with its manifest entry. Raises Damaged with the difference, StorageError if unreadable."""
        self.patiently(f"{name(step)}/{file}", partial(self._compare, f"{name(step)}/{file}", expected))

    def withdraw(self, step: int, word: str = "bad") -> str:
        """Withdraw a checkpoint by renaming it, which keeps its files; return its new name."""
        with self.doing(f"quarantine {self.path(step)}"):
            return self.backend.withdraw(name(step), word)

    def prune(self, *, keep: int, spare: int | None = None) -> None:
        """Delete all checkpoints but the newest `keep` and that of step `spare`, and drafts up to the newest step."""
        steps = self.steps()
        for old in steps[keep:]:
            if old != spare:
                self.remove(old)
        with self.doing("clear"):
            self.backend.clear_drafts(max(steps, default=-1))

    def remove(self, step: int) -> None:
        """Delete a checkpoint; it is withdrawn first, so that a partial one is never visible."""
        with self.doing(f"delete {self.path(step)}"):
            try:
                self.backend.remove(name(step), partial(self.manifest, step))
            except Damaged:
                self.withdraw(step)

    def start_over(self) -> None:
        """Withdraw all checkpoints, bad ones too, so that a run starts from zero. No files are deleted."""
        for step in self.steps():
            self.withdraw(step, "previous")
        with self.doing("set the earlier run aside"):
            for each in self.backend.withdrawn("bad"):
                self.backend.withdraw(each, "previous")

    def patiently(self, file: str, read: Callable[[], T]) -> T:
        """Call `read`, and retry on errors that may be temporary.

        Raises Damaged: the file is missing or malformed. Raises StorageError: the last try failed.
        """
        for further in reversed(range(TRIES)):
            try:
                return read()
            except MusterError:
                raise
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
                raise Damaged(f"{self.root}/{file}: {error}") from error
            except Exception as error:
                if not further:
                    reason = _reason(error)
                    raise StorageError(
                        f"cannot read {self.root}/{file}: {reason}; fix the cause, then run again"
                    ) from error
                self.clock.sleep(PAUSE_S)
        raise AssertionError

    def _record(self, step: int, file: str, read: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        def text() -> bytes:
            with self.backend.get(f"{name(step)}/{file}") as stream:
                return bytes(stream.read())

        found = self.patiently(f"{name(step)}/{file}", text)
        try:
            return read(found)
        except Damaged as error:
            raise Damaged(f"{self.path(step)}/{file}: {error}") from error

    def _compare(self, file: str, expected: dict[str, Any]) -> None:
        if (size := self.backend.size(file)) != expected["size"]:
            raise Damaged(f"{self.root}/{file} has {size} bytes instead of {expected['size']}")
        with self.backend.get(file) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected["sha256"]:
                raise Damaged(f"{self.root}/{file} has changed since it was written: its SHA-256 differs")

    def _is_whole(self, step: int) -> bool:
        try:
            for file, expected in self.manifest(step)["files"].items():
                self.compare(step, file, expected)
        except Damaged:
            return False
        return True

    def _see(self, file: str, size: int) -> None:
        """Wait until another rank's file is visible with its full size: a network file system may show it late."""
        deadline, there = self.clock.monotonic() + SEEN_WITHIN_S, -1
        while there != size:
            with contextlib.suppress(FileNotFoundError), self.doing(f"read {file}", FileNotFoundError):
                there = self.backend.size(file)
            if there == size:
                return
            if self.clock.monotonic() > deadline:
                found = "is missing" if there < 0 else f"has {there} bytes instead of {size}"
                raise StorageError(
                    f"{self.root}/{file} {found} on rank 0, although another rank has written it: "
                    "use a file system that all nodes share"
                )
            self.clock.sleep(PAUSE_S / 10)

    @contextlib.contextmanager
    def doing(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Turn any exception of a backend into a one-line StorageError; exceptions `passed` are raised unchanged."""
        try:
            yield
        except MusterError:
            raise
        except Exception as error:
            if isinstance(error, passed):
                raise
            kind = Unclear if isinstance(error, Unsure) else StorageError
            reason = without(_reason(error), self.backend.root)
            raise kind(
                f"cannot {what} in {self.root}: {reason}; free space or fix the cause, then run again"
            ) from error


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint: its storage and its manifest."""

    storage: Storage
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def path(self) -> str:
        return self.storage.path(self.step)

    def index(self) -> dict[str, Any]:
        """Read the checkpoint's index. Raises StorageError."""
        return self.storage.index(self.step, self.manifest)

    def compare(self, file: str) -> None:
        """Compare a file with the manifest. Raises Damaged if it has changed, StorageError if it cannot be read."""
        place = self._place(file)
        self.storage.compare(self.step, place, self.manifest["files"][place])

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """Open a file of the checkpoint for reading, at its place in the backend. Raises StorageError."""
        place = self._place(file)
        opened = partial(self.storage.backend.get, f"{name(self.step)}/{place}")
        with self.storage.patiently(f"{name(self.step)}/{place}", opened) as stream:
            yield stream

    def _place(self, file: str) -> str:
        if (place := place_of(file, self.manifest)) is None:
            raise Damaged(f"{self.path} has no {file}")
        return place


def place_of(file: str, manifest: dict[str, Any]) -> str | None:
    """Return a file's name in the checkpoint, with its folder; None if the manifest does not list it."""
    return next((each for each in manifest["files"] if each.rpartition("/")[2] == file), None)


def _backend(place: str) -> Backend:
    """Return the backend that `place` names. Raises StorageError: some clients connect in their constructor."""
    try:
        return at(place)
    except MusterError:
        raise
    except Exception as error:
        raise StorageError(
            f"cannot use {place}: {without(_reason(error), place)}; fix the cause, then run again"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Stream(Protocol):
    def write(self, data: Any) -> Any: ...


class Hashing:
    """A write-only stream that computes the size in bytes and SHA-256 of the data written."""

    def __init__(self, stream: _Stream):
        self._stream, self._size, self._digest = stream, 0, hashlib.sha256()

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        self._stream.write(view)
        return len(view)
