"""outcome.json: how the last attempt ended, for launchers that hide exit codes and for the next attempt.

A refused command is not an attempt: if the folder has a record, or another attempt runs there, the command writes
refused.json instead. If a record was damaged or edited, entries of the wrong type count as missing.
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
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from muster.files import create_file, replace_file
from muster.redact import redacted_all
from muster.world.environment import job, record_name

RUNNING = "running"
DONE, PREEMPTED = "done", "preempted"
FAILURES = (RUNNING, "failed", "rank_lost")
"""Outcomes after which the next attempt may get no further either: it was killed, or a rank failed."""
OUTCOME, REFUSED = "outcome.json", "refused.json"
LARGEST = 2**62
_WRITING = threading.RLock()  # held by the checkpoint's writer or the thread that ends the attempt


class Commit(TypedDict):
    step: int
    path: str


@dataclass(frozen=True)
class Outcome:
    """The state or the end of an attempt at a run.

    token: number of the attempt; an attempt with a larger token has taken the run over.
    agents: the launchers of all ranks (environment.launcher).
    launcher: the job's name from `muster launch` or the scheduler, or the agent of the rank that wrote this.
    asked_for: the most ranks that its launcher was asked to start, if known.
    furthest, idle_attempts, idle_preemptions: carried from attempt to attempt, to detect attempts that make no progress.
        For a start that never had the run, `idle_attempts` counts the failures in a row up to it, and `token` is that of
        the run's record at the time.
    times_held: starts in a row that found the run held by another part of their job.
    checkpoint: the newest commit, so that its loss is noticed.
    error, traceback, rank, failed_host: of the first cause, if the attempt failed.
    bad_host: the one host of several that the doctor found unable to train.
    flight_recorder: folder with each rank's last collectives on GPUs, if the attempt ended in a hang.
    cause: the error of the last attempt before this one that failed.
    failure: equal for two errors with the same traceback. failure_before: that of the previous attempt.
    job, meets_at, restarts: only in a claim, see folder_lease.py.
    """

    outcome: str = "none"
    exit_code: int | None = None
    attempt: str = ""
    token: Annotated[int, Field(ge=0, lt=LARGEST)] = 0
    agents: tuple[str, ...] = ()
    launcher: str = ""
    host: str = ""
    time: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    world_size: int | None = None
    asked_for: int | None = None
    step: int | None = None
    total_steps: int | None = None
    furthest: int = -1
    idle_attempts: int = 0
    idle_preemptions: int = 0
    times_held: int = 0
    checkpoint: Commit | None = None
    cause: str | None = None
    error: str | None = None
    rank: int | None = None
    failed_host: str | None = None
    flight_recorder: str | None = None
    bad_host: str | None = None
    traceback: str | None = None
    failure: str | None = None
    failure_before: str | None = None
    job: str | None = None
    meets_at: str | None = None
    restarts: bool | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Outcome:
        return cls(**_known(record))

    def is_same_launch(self, agents: list[str]) -> bool:
        """Whether this is a restart: the same scheduler job, or one of `agents`, started this attempt."""
        return bool(job() and self.launcher == job()) or self.has_agent(agents)

    def has_agent(self, agents: list[str]) -> bool:
        return not {*self.agents}.isdisjoint(agents)

    def idle(self, furthest: int) -> tuple[int, int]:
        """Return (failures, clean preemptions) in a row, up to this attempt, that got no further than earlier attempts.

        The count restarts after a reported crash loop, and after any end but a failure or a preemption.
        """
        if furthest > self.furthest or self.outcome not in (*FAILURES, PREEMPTED):
            return 0, 0
        stopped = self.outcome == PREEMPTED
        return self.idle_attempts + (not stopped), self.idle_preemptions + stopped


def last(folder: Path) -> Outcome:
    """Return the last attempt; one with outcome "none" if there is no readable record."""
    return Outcome.of(read(folder))


def write(folder: Path, attempt: Outcome) -> None:
    """Replace outcome.json atomically; without a checkpoint in `attempt`, keep the entry. Raises StorageError."""
    with _WRITING:
        newest = attempt.checkpoint or read(folder).get("checkpoint")
        _replace(folder / OUTCOME, replace(attempt, checkpoint=newest))


def refuse(folder: Path, attempt: Outcome, *, beside: bool) -> Path:
    """Write refused.json if `beside`, or if the run has a record; else outcome.json. Return the file's path.

    Replacing a run's outcome.json would make the attempt that holds the run conclude that it lost it.
    Raises StorageError, OSError.
    """
    if not beside:
        with contextlib.suppress(FileExistsError):
            create_file(folder / OUTCOME, _text(attempt).encode())
            return folder / OUTCOME
    _replace(folder / REFUSED, attempt)
    return folder / REFUSED


def note_commit(folder: Path, attempt: str, *, step: int, path: str) -> None:
    """Record the newest checkpoint, if the record is that of `attempt`. Raises StorageError."""
    with _WRITING:
        before = last(folder)
        if before.attempt == attempt:
            write(folder, replace(before, checkpoint={"step": step, "path": path}))


def read(folder: Path) -> dict[str, Any]:
    return read_record(folder / OUTCOME)


def newest(folder: Path, *, launcher: str = "") -> dict[str, Any]:
    """For launchers: return the record of the last command, whether it was an attempt or refused.

    `launcher`: read only its records, and those that name none.
    """
    # The refusal first: of two records of the same millisecond it is the later one.
    records = read_record(folder / REFUSED), read_record(folder / OUTCOME)
    own = [each for each in records if each and (not launcher or each.get("launcher", launcher) == launcher)]
    return max(own, key=lambda record: float(record.get("time", 0.0)), default={})


def start_before(folder: Path, attempt: str) -> Outcome:
    """Return the last start before `attempt` that never had the run, unless an attempt has had the run since."""
    run, refused = last(folder), Outcome.of(read_record(folder / REFUSED))
    for start in (refused, run if not run.token else Outcome()):
        if start.attempt not in ("", attempt) and start.token == run.token:
            return start
    return Outcome(token=run.token)


def read_record(path: Path) -> dict[str, Any]:
    """Return the valid entries of a record file; `{}` if it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return _known(record) if isinstance(record, dict) else {}


def _replace(path: Path, attempt: Outcome) -> None:
    text = _text(attempt)
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def _text(attempt: Outcome) -> str:
    own = {"host": socket.gethostname(), "time": round(time.time(), 3), "launcher": record_name()}
    record = {key: value for key, value in asdict(replace(attempt, **own)).items() if value is not None}  # type: ignore[arg-type]
    return (
        json.dumps(redacted_all({"outcome": attempt.outcome, "exit_code": attempt.exit_code} | record), indent=1) + "\n"
    )


_TYPES: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind) for name, kind in get_type_hints(Outcome, include_extras=True).items()
}


def _known(record: Mapping[str, Any]) -> dict[str, Any]:
    known = {}
    for each in fields(Outcome):
        value = record.get(each.name)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        with contextlib.suppress(ValidationError):
            if value is not None:
                known[each.name] = _TYPES[each.name].validate_python(value, strict=True)
    return known
