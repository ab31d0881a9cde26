"""Where checkpoints lie: a folder that all nodes share, or an object store by fsspec URL.

Both keep to one protocol. Files are first written where nobody looks for a checkpoint; one last act makes them one: in
a folder the rename of the finished draft, in a store without rename the manifest, written last and once. Until then a
killed writer has left nothing but a draft. Every file's size and SHA-256 are in the manifest: torch reads a file with
flipped bits without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from train.errors import Damaged, StorageError

STEP = re.compile(r"step-(\d{8,})$")
MANIFEST = "manifest.json"
TRIES, PAUSE_S = 3, 1.0
T = TypeVar("T")
Files = dict[str, dict[str, Any]]
"""Name -> {"size": bytes, "sha256": hex digest}."""


class Storage(ABC):
    """The checkpoints of one run, by step. All methods raise StorageError."""

    root: str

    def path(self, step: int) -> str:
        """The place of the checkpoint of `step`, for people."""
        return f"{self.root}/{name(step)}"

    @abstractmethod
    def prepare(self) -> None:
        """Make the place and clear away what killed writers left."""

    @abstractmethod
    def write(self, step: int, attempt: str, part: str, value: Any) -> Files:
        """Write one part (`state`, `rank-00001`) of a draft: tensors and plain values."""

    @abstractmethod
    def commit(self, step: int, attempt: str, manifest: dict[str, Any]) -> bool:
        """Make the draft a checkpoint; False if `step` is one already, which is then left as it is."""

    @abstractmethod
    def abandon(self, step: int, attempt: str) -> None:
        """Remove a draft, as far as that can be done."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Committed checkpoints, newest first."""

    @abstractmethod
    def bad(self) -> list[str]:
        """Names of checkpoints that were put aside."""

    @abstractmethod
    def open(self, step: int, file: str) -> contextlib.AbstractContextManager[Any]:
        """A file of a checkpoint, for reading in binary."""

    @abstractmethod
    def size(self, step: int, file: str) -> int:
        """Bytes of a file of a checkpoint."""

    @abstractmethod
    def read(self, step: int, part: str, manifest: dict[str, Any]) -> Any:
        """What `write` was given, on the CPU."""

    @abstractmethod
    def put_aside(self, step: int, word: str = "bad") -> str:
        """Make a checkpoint none, without losing it; gives its new name. Raises StorageError."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Delete a checkpoint so that at no moment half of one is there."""

    @abstractmethod
    def start_over(self) -> None:
        """Put all checkpoints aside, the bad ones too, so that a run begins anew; nothing is lost."""

    def manifest(self, step: int) -> dict[str, Any]:
        """Raises Damaged if it is missing or no manifest, StorageError if it cannot be read."""

        def read() -> dict[str, Any]:
            with self.open(step, MANIFEST) as file:
                manifest: dict[str, Any] = json.loads(file.read())
            int(manifest["step"]), dict(manifest["files"])
            return manifest

        return self._patiently(step, MANIFEST, read)

    def verify(self, step: int) -> dict[str, Any]:
        """Its manifest, after every file that it names was compared.

        Raises:
            Damaged: says what is wrong with which file.
            StorageError: a file cannot be read.
        """
        manifest = self.manifest(step)
        for file, expected in manifest["files"].items():
            self._patiently(step, file, partial(self._compare, step, file, expected))
        return manifest

    def _compare(self, step: int, file: str, expected: dict[str, Any]) -> None:
        at = f"{self.path(step)}/{file}"
        if (size := self.size(step, file)) != expected["size"]:
            raise Damaged(f"{at} has {size} bytes instead of {expected['size']}")
        with self.open(step, file) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected["sha256"]:
                raise Damaged(f"{at} has changed since it was written: its SHA-256 differs")

    def _patiently(self, step: int, file: str, read: Callable[[], T]) -> T:
        """A file that is missing or wrong is damage; whatever else keeps it from being read may pass."""
        for further in reversed(range(TRIES)):
            try:
                return read()
            except Damaged:
                raise
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
                raise Damaged(f"{self.path(step)}/{file}: {error}") from error
            except Exception as error:
                if not further:
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    raise StorageError(
                        f"cannot read {self.path(step)}/{file}: {reason}; mend that, then run again"
                    ) from error
                time.sleep(PAUSE_S)
        raise AssertionError


def name(step: int) -> str:
    return f"step-{step:08d}"


class _Stream(Protocol):
    def write(self, data: Any) -> Any: ...


class Hashing:
    """A file that digests what passes through. torch writes from start to end."""

    def __init__(self, file: _Stream):
        self.file, self._size, self._digest = file, 0, hashlib.sha256()

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        self.file.write(view)
        return len(view)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.file, attribute)
