"""Writing of figures to a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muster.errors import storage_error
from muster.files import replace_file


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` to `path`, and create its folder. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("make the folder", error) from error
    text = json.dumps(figures, indent=1) + "\n"
    replace_file(path, lambda draft: draft.write_text(text))
