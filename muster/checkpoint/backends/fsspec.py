"""Checkpoints in an object store, on any fsspec file system.

Source: https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from muster.checkpoint.backends.base import Unsure
from muster.checkpoint.backends.by_manifest import CommitByManifest
from muster.errors import ConfigError
from muster.redact import without

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class ObjectStore(CommitByManifest):
    def __init__(self, url: str):
        self.root = url.rstrip("/")
        if found := re.search(r"[*?\[\]]", url):
            raise ConfigError(f"checkpoint.storage={url}: {found[0]} is a pattern in fsspec: use another name")
        try:
            from fsspec.core import url_to_fs

            self.fs, self.base = url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            package = PACKAGES.get(url.split("://")[0])
            hint = f"pip install {package}" if package else "see fsspec.available_protocols() for the schemes"
            raise ConfigError(f"checkpoint.storage={url}: {without(str(error), url)}; {hint}") from error

    def prepare(self) -> None:
        """Create the folder, which some file systems need; fails now if the store cannot be reached."""
        self.list()
        self.fs.makedirs(self.base, exist_ok=True)

    def put(self, name: str) -> contextlib.AbstractContextManager[Any]:
        self.fs.makedirs(self._key(name).rpartition("/")[0], exist_ok=True)
        return self.fs.open(self._key(name), "wb")  # type: ignore[no-any-return]

    def create(self, name: str, data: bytes) -> None:
        """Create a file. On an error compare its content: the request may have succeeded and its retry been refused."""
        key = self._key(name)
        try:
            self.fs.pipe_file(key, data, mode="create")
        except Exception as error:
            there = self._read(key)
            if there is None:
                raise Unsure(f"{type(error).__name__}: {error}") from error
            if there != data:
                raise FileExistsError(f"{key} exists") from error

    def get(self, name: str) -> contextlib.AbstractContextManager[Any]:
        self.fs.invalidate_cache()
        return self.fs.open(self._key(name), "rb")  # type: ignore[no-any-return]

    def list(self, folder: str = "") -> list[str]:
        self.fs.invalidate_cache()
        try:
            keys = self.fs.ls(self._key(folder).rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(key.rstrip("/").rsplit("/", 1)[-1] for key in keys)

    def size(self, name: str) -> int:
        self.fs.invalidate_cache()
        return int(self.fs.size(self._key(name)))

    def delete(self, name: str) -> None:
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._key(name), recursive=True)

    def rename(self, old: str, new: str) -> None:
        """Copy, then delete: not every server supports gcsfs's own `mv`."""
        self.fs.copy(self._key(old), self._key(new))
        self.fs.rm(self._key(old))

    def _read(self, key: str) -> bytes | None:
        with contextlib.suppress(Exception):
            self.fs.invalidate_cache()
            return bytes(self.fs.cat_file(key))
        return None

    def _key(self, name: str) -> str:
        return f"{self.base}/{name}"
