"""Files that are created or replaced atomically, and durably: content and name survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.errors import storage_error

DRAFT = ".draft-"


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable, where the file system can sync a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # as on some FUSE and network file systems
            raise
    finally:
        os.close(handle)


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` fill a draft, and rename it to `path`. On a disk the syncs take some milliseconds: too long at every step.

    Raises StorageError.
    """
    draft = draft_of(path)
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error("write", error, path) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def create_file(path: Path, data: bytes) -> None:
    """Create a file durably, and atomically where hard links work. Raises FileExistsError, OSError."""
    draft = draft_of(path)
    try:
        _write(draft, data)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links, as some on object stores
            _write(path, data)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def draft_of(path: Path) -> Path:
    """Return a unique path beside `path`. A pid would not be unique: processes in several containers can share one."""
    return path.with_name(f"{DRAFT}{uuid.uuid4().hex}.{path.name}")


def clear_drafts(folder: Path) -> None:
    """Remove drafts that killed writers left. Only the sole writer to `folder` may call it."""
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):
            draft.unlink()
