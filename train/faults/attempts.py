"""outcome.json: how the last attempt ended, for launchers that hide exit codes, and for the attempt after it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from train.files import replace_file

RUNNING = "running"
FINISHED = ("done", "preempted")


def write(folder: Path, outcome: str, *, exit_code: int | None, attempt: str, **details: Any) -> None:
    """Replace the file in one step. Raises StorageError."""
    record = {
        "outcome": outcome,
        "exit_code": exit_code,
        "attempt": attempt,
        "host": socket.gethostname(),
        "time": round(time.time(), 3),
        "launcher": job() or launcher(),
        **details,
    }
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


def launcher() -> str:
    """The process that started this one and starts it again, unlike any other: host, pid, and when it began.

    A rendezvous id does not do: people give every launch the same.
    """
    pid = os.getppid() if "RANK" in os.environ else os.getpid()
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # clock ticks since boot
    except OSError:
        began = ""
    return f"{socket.gethostname()}:{pid}:{began}"


def job() -> str:
    """The scheduler's name of the job, which it keeps when it requeues it; empty if there is none."""
    return f"slurm:{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""


def same_launch(before: dict[str, Any], agents: list[str]) -> bool:
    """Whether the attempt `before` was started by the same job, or by one of the `agents` that started this one."""
    if job():
        return bool(before.get("launcher") == job())
    return bool({*before.get("agents", ())} & {*agents})
