"""Storage backends of checkpoints, one file each. base.py is the interface."""

from __future__ import annotations

from pathlib import Path

from muster.checkpoint.backends.base import Backend
from muster.checkpoint.backends.folder import Directory
from muster.checkpoint.backends.fsspec import ObjectStore
from muster.import_by_path import imported


def at(place: str) -> Backend:
    """Return the backend of `place`: a folder's path, an fsspec URL, or `package.module.Class://...` (custom class).

    Raises ConfigError: there is no such class, or the URL's file system is not installed.
    """
    scheme, found, _ = place.partition("://")
    if not found:
        return Directory(Path(place))
    if "." not in scheme:
        return ObjectStore(place)
    backend: Backend = imported(scheme, said=f"checkpoint.storage={scheme}")(place)
    return backend
