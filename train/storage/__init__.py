"""Where checkpoints lie."""

from __future__ import annotations

from pathlib import Path

from train.storage.base import MANIFEST, STEP, Files, Storage, name
from train.storage.bucket import Bucket
from train.storage.folder import Folder

__all__ = ["MANIFEST", "STEP", "Files", "Storage", "at", "name"]


def at(place: str) -> Storage:
    """The storage that a path or an fsspec URL names. Raises ConfigError if the URL's file system is not installed."""
    return Bucket(place) if "://" in place else Folder(Path(place))
