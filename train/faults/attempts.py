"""outcome.json: how the last attempt ended, for launchers that hide exit codes, and for the attempt after it.

A command that is refused is no attempt: where the folder has a record, or another is at work, it leaves refused.json.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from train.dist.place import job, launcher
from train.files import create_file, replace_file

RUNNING = "running"
DONE, PREEMPTED = "done", "preempted"
FAILURES = (RUNNING, "failed", "rank_lost")
"""Ends of an attempt after which the next one may still come no further: it was killed, or a rank failed."""
OUTCOME, REFUSED = "outcome.json", "refused.json"
_WRITING = threading.RLock()  # the checkpoint's writer and whoever ends the attempt


@dataclass(frozen=True)
class Attempt:
    """How an attempt at a run stands, or ended.

    token: counts the attempts; whoever has a larger one has taken the run over.
    agents: the launchers of all ranks (place.launcher). launcher: the scheduler's job, or rank 0's agent.
    world_size, asked_for: ranks of the attempt, and the most that its launcher was told to start, if it says so.
    furthest, idle_attempts, idle_preemptions: kept from attempt to attempt, to see whether they come any further.
    checkpoint: the newest commit, {step, path}, so that it is missed when it is gone.
    error, traceback, rank, failed_host: of the first cause, if it failed; cause: of the attempt before.
    failure: the same for two errors at the same step with the same traceback; failure_before: of the attempt before.
    """

    outcome: str = "none"
    exit_code: int | None = None
    attempt: str = ""
    token: int = 0
    agents: tuple[str, ...] = ()
    launcher: str = ""
    host: str = ""
    time: float = 0.0
    world_size: int | None = None
    asked_for: int | None = None
    step: int | None = None
    total_steps: int | None = None
    furthest: int = -1
    idle_attempts: int = 0
    idle_preemptions: int = 0
    checkpoint: dict[str, Any] | None = None
    cause: str | None = None
    error: str | None = None
    rank: int | None = None
    failed_host: str | None = None
    traceback: str | None = None
    failure: str | None = None
    failure_before: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Attempt:
        """From outcome.json; what it does not know, or knows of another type, is left out."""
        known = {each.name: record[each.name] for each in fields(cls) if record.get(each.name) is not None}
        return cls(**{**known, "agents": tuple(known.get("agents", ()))})

    def is_same_launch(self, agents: list[str]) -> bool:
        """Whether the same scheduler's job, or one of `agents`, started it: it is then a restart, no new launch."""
        return bool(job() and self.launcher == job()) or self.has_agent(agents)

    def has_agent(self, agents: list[str]) -> bool:
        """Whether one of `agents` started it."""
        return not {*self.agents}.isdisjoint(agents)

    def idle(self, furthest: int) -> tuple[int, int]:
        """(failures, clean preemptions) in a row up to this one without a step further than any attempt before them.

        A crash loop that has been reported, and any end but a failure or a preemption, begins the count anew.
        """
        if furthest > self.furthest or self.outcome not in (*FAILURES, PREEMPTED):
            return 0, 0
        stopped = self.outcome == PREEMPTED
        return self.idle_attempts + (not stopped), self.idle_preemptions + stopped


def last(folder: Path) -> Attempt:
    """The last attempt in `folder`; one of outcome "none" if there is no record that can be read."""
    return Attempt.of(read(folder))


def write(folder: Path, attempt: Attempt) -> None:
    """Replace outcome.json in one step; where the newest checkpoint lies is kept. Raises StorageError."""
    with _WRITING:
        newest = attempt.checkpoint or read(folder).get("checkpoint")
        _replace(folder / OUTCOME, replace(attempt, checkpoint=newest))


def refuse(folder: Path, attempt: Attempt, *, beside: bool) -> None:
    """Leave word of a command that was refused, `beside` the run's record if there is one or another is to write it.

    That must not be replaced: whoever holds the run would think it had lost it. Raises StorageError, OSError.
    """
    if not beside:
        with contextlib.suppress(FileExistsError):
            return create_file(folder / OUTCOME, _text(attempt).encode())
    _replace(folder / REFUSED, attempt)


def note_commit(folder: Path, attempt: str, *, step: int, path: str) -> None:
    """Note the newest checkpoint. Raises StorageError."""
    with _WRITING:
        before = last(folder)
        if before.attempt == attempt:
            write(folder, replace(before, checkpoint={"step": step, "path": path}))


def read(folder: Path) -> dict[str, Any]:
    """The last attempt's record as it stands in the file; `{}` if there is none that can be read."""
    return _read(folder / OUTCOME)


def newest(folder: Path) -> dict[str, Any]:
    """For launchers: how the last command ended, be it an attempt or refused."""
    records = (_read(folder / OUTCOME), _read(folder / REFUSED))
    return max(records, key=lambda record: float(record.get("time", 0.0)))


def _replace(path: Path, attempt: Attempt) -> None:
    text = _text(attempt)
    replace_file(path, lambda draft: draft.write_text(text))


def _text(attempt: Attempt) -> str:
    own = {"host": socket.gethostname(), "time": round(time.time(), 3), "launcher": job() or launcher()}
    record = {key: value for key, value in asdict(replace(attempt, **own)).items() if value is not None}  # type: ignore[arg-type]
    return json.dumps({"outcome": attempt.outcome, "exit_code": attempt.exit_code} | record, indent=1) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
