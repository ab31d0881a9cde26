"""Where checkpoints lie."""

from __future__ import annotations

from pathlib import Path

from train.checkpoint.backends.base import MANIFEST, STEP, Files, Storage, name
from train.checkpoint.backends.folder import Folder
from train.checkpoint.backends.fsspec import Bucket

__all__ = ["MANIFEST", "STEP", "Files", "Storage", "at", "name"]


def at(place: str) -> Storage:
    """The storage that a path or an fsspec URL names. Raises ConfigError if the URL's file system is not installed."""
    return Bucket(place) if "://" in place else Folder(Path(place))
