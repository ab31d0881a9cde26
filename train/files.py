"""Files that are created or replaced atomically; a replacement is synced, to survive a power failure."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.errors import storage_error

DRAFT = ".draft-"


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace `path` atomically: `write` fills a draft beside it, which is synced and renamed. Raises StorageError."""
    draft = draft_of(path)
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise storage_error(f"write {path}:", error) from error


def create_file(path: Path, data: bytes) -> None:
    """Create a file with its content atomically (where hard links work). Raises FileExistsError, OSError."""
    draft = draft_of(path)
    try:
        draft.write_bytes(data)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links, as some on object stores
            with path.open("xb") as file:
                file.write(data)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Return a unique path beside `path`. A pid would not be unique: processes in several containers can share one."""
    return path.with_name(f"{DRAFT}{uuid.uuid4().hex}.{path.name}")


def clear_drafts(folder: Path) -> None:
    """Remove drafts that killed writers left. Only the sole writer to `folder` may call it."""
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):
            draft.unlink()
