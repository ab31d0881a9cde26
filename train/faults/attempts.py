"""outcome.json: how the last attempt ended, for launchers that hide exit codes, and for the attempt after it."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from train.dist.place import job, launcher
from train.files import replace_file

RUNNING = "running"
FINISHED = ("done", "preempted")
_WRITING = threading.Lock()  # the checkpoint's writer and whoever ends the attempt


def write(folder: Path, outcome: str, *, exit_code: int | None, attempt: str, **details: Any) -> None:
    """Replace the file in one step; where the newest checkpoint lies is kept. Raises StorageError."""
    with _WRITING:
        _write(folder, outcome, exit_code=exit_code, attempt=attempt, **{**_newest(folder), **details})


def note_commit(folder: Path, attempt: str, *, step: int, path: str) -> None:
    """Note the newest checkpoint, so that it is missed when it is gone. Raises StorageError."""
    with _WRITING:
        record = read(folder)
        if record.get("attempt") == attempt:
            _replace(folder, {**record, "checkpoint": {"step": step, "path": path}})


def _newest(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in read(folder).items() if key == "checkpoint"}


def _write(folder: Path, outcome: str, *, exit_code: int | None, attempt: str, **details: Any) -> None:
    record = {
        "outcome": outcome,
        "exit_code": exit_code,
        "attempt": attempt,
        "host": socket.gethostname(),
        "time": round(time.time(), 3),
        "launcher": job() or launcher(),
        **details,
    }
    _replace(folder, record)


def _replace(folder: Path, record: dict[str, Any]) -> None:
    replace_file(folder / "outcome.json", lambda draft: draft.write_text(json.dumps(record, indent=1) + "\n"))


def read(folder: Path) -> dict[str, Any]:
    """The last attempt's record; `{}` if there is none that can be read."""
    try:
        record = json.loads((folder / "outcome.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_latest(folder: Path, attempt: str) -> bool:
    """Whether no later attempt has taken the run over: one that was cut off must not write any more."""
    return bool(read(folder).get("attempt", attempt) == attempt)


def idle_attempts(before: dict[str, Any], furthest: int) -> int:
    """How many attempts in a row have ended without a step further than any attempt before them.

    A crash loop that has been reported, and any end but a failure or a preemption, begins the count anew.
    """
    if before.get("outcome") not in (RUNNING, "failed", "rank_lost", "preempted") or furthest > before.get(
        "furthest", -1
    ):
        return 0
    return int(before.get("idle_attempts", 0)) + 1
