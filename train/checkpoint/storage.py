"""The commit protocol, once for every place.

Files are first written where nobody looks for a checkpoint; one last act, the backend's `publish`, makes them one.
Until then a killed writer has left nothing but a draft. Every file's size and SHA-256 are in the manifest, whose own is
in it, too: torch reads a file with flipped bits without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from train.checkpoint.backends import at
from train.checkpoint.backends.base import MANIFEST, Backend, Unsure
from train.checkpoint.records import INDEX, read_index, read_manifest, sealed
from train.errors import Damaged, MusterError, StorageError
from train.files import DRAFT
from train.redact import redacted, without

STEP = re.compile(r"step-([0-9]{8,18})")
FORMAT = 2
OLD = ".old"
TRIES, PAUSE_S = 3, 1.0
SEEN_WITHIN_S = 10.0
T = TypeVar("T")
Files = dict[str, dict[str, Any]]
"""Name -> {"size": bytes, "sha256": hex digest}."""


class Unclear(StorageError):
    """The commit failed, and the checkpoint may be there all the same."""


class Lost(StorageError):
    """The run's folder or its storage is not the run's any more, and no later save will find it so."""


class Storage:
    """The checkpoints of one run, by step. All methods raise StorageError."""

    def __init__(self, place: str | Backend):
        self.backend = _backend(place) if isinstance(place, str) else place
        self.root = redacted(self.backend.root)

    def path(self, step: int) -> str:
        """The place of the checkpoint of `step`, for people."""
        return f"{self.root}/{name(step)}"

    def prepare(self) -> None:
        """Make the place."""
        with self.doing("use"):
            self.backend.prepare()

    def clear(self) -> None:
        """Clear away what killed writers left: for the place's owner alone."""
        with self.doing("use"):
            for each in self.backend.list() if self.backend.renames else []:
                if each.startswith((".step-", f"{OLD}-step-", DRAFT)):
                    self.backend.delete(each)

    @contextlib.contextmanager
    def write(self, step: int, attempt: str, file: str) -> Iterator[Hashing]:
        """A file of a draft, to be written from start to end; afterwards its `facts` are known."""
        with self.doing(f"write {self.path(step)}"), self.backend.put(f"{self._draft(step, attempt)}/{file}") as to:
            yield Hashing(to)

    def commit(self, step: int, attempt: str, manifest: dict[str, Any], files: Files) -> bool:
        """Make the draft a checkpoint; False if there is a whole one of this step, which is then left as it is.

        Raises:
            StorageError: a file of the draft is not to be seen here, or it could not be published.
            Unclear: it may have been published: the draft must be left.
        """
        draft, inside = self._draft(step, attempt), "" if self.backend.renames else f"{attempt}/"
        for file, facts in files.items():
            self._see(f"{draft}/{file}", facts["size"])
        whole = {"format": FORMAT, **manifest, "files": {f"{inside}{file}": facts for file, facts in files.items()}}
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
        """Remove a draft, as far as that can be done."""
        with contextlib.suppress(Exception):
            self.backend.delete(self._draft(step, attempt))

    def steps(self) -> list[int]:
        """Committed checkpoints, newest first."""
        with self.doing("list"):
            return [step for step in self._folders() if self._is_published(step)]

    def bad(self) -> list[str]:
        """Names of checkpoints that were quarantined."""
        with self.doing("list"):
            return self._withdrawn("bad")

    def manifest(self, step: int) -> dict[str, Any]:
        """Raises Damaged if it is missing or not as it was written, StorageError if it cannot be read."""
        manifest = self._record(step, MANIFEST, partial(read_manifest, step=step))
        if (given := manifest.get("format", 1)) != FORMAT:
            raise StorageError(
                f"{self.path(step)} has format {given}, and this version of the kit reads {FORMAT}: "
                "use the version that wrote it, or start over with checkpoint.resume=never"
            )
        return manifest

    def index(self, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
        """What lies where in the checkpoint with this manifest. Raises as `manifest` does."""
        place = place_of(INDEX, manifest)
        if place is None:
            raise Damaged(f"{self.path(step)}/{MANIFEST}: it names no {INDEX}")
        return self._record(step, place, partial(read_index, manifest=manifest))

    def compare(self, step: int, file: str, expected: dict[str, Any]) -> None:
        """Raises Damaged, which says what is wrong with the file; StorageError if it cannot be read."""
        self.patiently(f"{name(step)}/{file}", partial(self._compare, f"{name(step)}/{file}", expected))

    def withdraw(self, step: int, word: str = "bad") -> str:
        """Make a checkpoint none, without losing it; gives its new name."""
        with self.doing(f"quarantine {self.path(step)}"):
            return self.backend.withdraw(name(step), word)

    def prune(self, *, keep: int, spare: int | None = None) -> None:
        """Delete all but the newest `keep` and that of step `spare`, and drafts left at steps before the newest."""
        steps = self.steps()
        for old in steps[keep:]:
            if old != spare:
                self.remove(old)
        with self.doing("clear"):
            for step in self._folders() if not self.backend.renames else []:
                if step <= max(steps, default=-1) and not self._is_named(step):
                    self.backend.delete(name(step))

    def remove(self, step: int) -> None:
        """Delete a checkpoint so that at no moment half of one is there."""
        with self.doing(f"delete {self.path(step)}"):
            try:
                inside = "" if self.backend.renames else f"{name(step)}/{self.manifest(step)['attempt']}"
            except Damaged:
                self.withdraw(step)
                return
            self.backend.delete(self.backend.withdraw(name(step), OLD))
            if inside:  # others may have been withdrawn there
                self.backend.delete(inside)

    def start_over(self) -> None:
        """Withdraw all checkpoints, the bad ones too, so that a run begins anew; nothing is lost."""
        for step in self.steps():
            self.withdraw(step, "previous")
        with self.doing("set the earlier run aside"):
            for each in self._withdrawn("bad"):
                self.backend.withdraw(each, "previous")

    def patiently(self, file: str, read: Callable[[], T]) -> T:
        """What `read` gives. A file that is missing or wrong is damage; what else keeps it from being read may pass."""
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
                        f"cannot read {self.root}/{file}: {reason}; mend that, then run again"
                    ) from error
                time.sleep(PAUSE_S)
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
        """Wait until a file that another rank wrote is to be seen from here: a network file system may show it late."""
        deadline, there = time.monotonic() + SEEN_WITHIN_S, -1
        while there != size:
            with contextlib.suppress(FileNotFoundError), self.doing(f"read {file}", FileNotFoundError):
                there = self.backend.size(file)
            if there == size:
                return
            if time.monotonic() > deadline:
                found = "is not there" if there < 0 else f"has {there} bytes instead of {size}"
                raise StorageError(
                    f"{self.root}/{file} {found} as rank 0 sees it, though it was written: "
                    "checkpoints must lie where all nodes see the same files"
                )
            time.sleep(PAUSE_S / 10)

    def _folders(self) -> list[int]:
        """The steps of which anything is there, newest first."""
        found = {int(match[1]): each for each in self.backend.list() if (match := STEP.fullmatch(each))}
        return sorted((step for step, each in found.items() if each == name(step)), reverse=True)

    def _is_published(self, step: int) -> bool:
        return self.backend.renames or MANIFEST in self.backend.list(name(step))

    def _is_named(self, step: int) -> bool:
        """Whether a manifest, also one that was withdrawn, says what the files of the step's folder are."""
        return any(file.endswith(MANIFEST) and not file.startswith(OLD) for file in self.backend.list(name(step)))

    def _withdrawn(self, word: str) -> list[str]:
        if self.backend.renames:
            return [each for each in self.backend.list() if each.startswith(f"{word}-step-")]
        folders = [name(step) for step in reversed(self._folders())]
        return [f"{at}/{file}" for at in folders for file in self.backend.list(at) if file.startswith(f"{word}-")]

    def _draft(self, step: int, attempt: str) -> str:
        return f".{name(step)}.{attempt}" if self.backend.renames else f"{name(step)}/{attempt}"

    @contextlib.contextmanager
    def doing(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Whatever a backend raises becomes one line."""
        try:
            yield
        except MusterError:
            raise
        except Exception as error:
            if isinstance(error, passed):
                raise
            kind = Unclear if isinstance(error, Unsure) else StorageError
            reason = without(_reason(error), self.backend.root)
            raise kind(f"cannot {what} in {self.root}: {reason}; free or mend it, then run again") from error


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

    def index(self) -> dict[str, Any]:
        """What lies where in it. Raises StorageError."""
        return self.storage.index(self.step, self.manifest)

    def compare(self, file: str) -> None:
        """Raises Damaged if the file is not as it was written; StorageError if it cannot be read."""
        place = self._place(file)
        self.storage.compare(self.step, place, self.manifest["files"][place])

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """A file that the manifest names, wherever the backend keeps it. Raises StorageError."""
        place = self._place(file)
        opened = partial(self.storage.backend.get, f"{name(self.step)}/{place}")
        with self.storage.patiently(f"{name(self.step)}/{place}", opened) as stream:
            yield stream

    def _place(self, file: str) -> str:
        if (place := place_of(file, self.manifest)) is None:
            raise Damaged(f"{self.path} has no {file}")
        return place


def place_of(file: str, manifest: dict[str, Any]) -> str | None:
    """Where a file lies in the checkpoint; None if the manifest does not name it."""
    return next((each for each in manifest["files"] if each.rpartition("/")[2] == file), None)


def _backend(place: str) -> Backend:
    """What `place` names. Some clients connect when they are made."""
    try:
        return at(place)
    except MusterError:
        raise
    except Exception as error:
        raise StorageError(f"cannot use {place}: {without(_reason(error), place)}; mend it, then run again") from error


def name(step: int) -> str:
    return f"step-{step:08d}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Stream(Protocol):
    def write(self, data: Any) -> Any: ...


class Hashing:
    """A stream that digests what passes through, from start to end."""

    def __init__(self, stream: _Stream):
        self._stream, self._size, self._digest = stream, 0, hashlib.sha256()

    @property
    def facts(self) -> dict[str, Any]:
        """Size in bytes and SHA-256 of what was meant to be written."""
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        self._stream.write(view)
        return len(view)
