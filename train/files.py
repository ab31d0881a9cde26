"""Files that are replaced in one step and survive a power cut."""

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
    """Make a rename or a new name in `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside `path`, then put it in its place in one step. Raises StorageError."""
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
    """Write a file with all its content in one step, unless there is one. Raises FileExistsError, OSError."""
    draft = draft_of(path)
    try:
        draft.write_bytes(data)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # no links here, as on some object file systems
            with path.open("xb") as file:
                file.write(data)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """A name beside `path` that no other process takes; pids do not do, containers have the same ones."""
    return path.with_name(f"{DRAFT}{uuid.uuid4().hex}.{path.name}")


def clear_drafts(folder: Path) -> None:
    """Remove what killed writers left: for whoever alone writes to `folder`."""
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):
            draft.unlink()
