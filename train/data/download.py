"""Download data, with an error message that says which files to place where."""

from __future__ import annotations

from typing import Any

from muster.errors import DataError


def download(fetch: Any, what: str) -> None:
    """Call `fetch`. Raises DataError, which says which files to place where instead, if it fails."""
    try:
        fetch()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(": ") if str(error).strip() else type(error).__name__
        raise DataError(f"download failed ({reason}): place {what}, or set data.root to where it is") from error
