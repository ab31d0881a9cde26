"""outcome.json: how the last attempt ended, for launchers that hide exit codes, and for the attempt after it.

A command that is refused is no attempt: where the folder has a record, or another is at work, it leaves refused.json.
Of a record that a disk or a hand has changed, each entry of another type than it is written with is as if missing.
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

from train.dist.place import job, record_name
from train.files import create_file, replace_file
from train.redact import redacted_all

RUNNING = "running"
DONE, PREEMPTED = "done", "preempted"
FAILURES = (RUNNING, "failed", "rank_lost")
"""Ends of an attempt after which the next one may still come no further: it was killed, or a rank failed."""
OUTCOME, REFUSED = "outcome.json", "refused.json"
LARGEST = 2**62
_WRITING = threading.RLock()  # the checkpoint's writer and whoever ends the attempt


class Commit(TypedDict):
    """The newest checkpoint of a run, for people to find."""

    step: int
    path: str


@dataclass(frozen=True)
class Attempt:
    """How an attempt at a run stands, or ended.

    token: counts the attempts; whoever has a larger one has taken the run over.
    agents: the launchers of all ranks (place.launcher). launcher: the job as `train.launch` or the scheduler names it,
    or the agent of the rank that wrote this.
    world_size, asked_for: ranks of the attempt, and the most that its launcher was told to start, if it says so.
    furthest, idle_attempts, idle_preemptions: kept from attempt to attempt, to see whether they come any further.
    times_held: starts in a row that found the run held by another part of their job. Of a start that never had the run,
    idle_attempts counts the failures in a row up to it, and token is that of the run's record at the time.
    checkpoint: the newest commit, {step, path}, so that it is missed when it is gone.
    error, traceback, rank, failed_host: of the first cause, if it failed; cause: of the attempt before.
    failure: the same for two errors at the same step with the same traceback; failure_before: of the attempt before.
    job, meets_at, restarts: of a claim alone: see lease.py.
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
    traceback: str | None = None
    failure: str | None = None
    failure_before: str | None = None
    job: str | None = None
    meets_at: str | None = None
    restarts: bool | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Attempt:
        """From outcome.json; what it does not know, or knows of another type, is left out."""
        return cls(**_known(record))

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


def refuse(folder: Path, attempt: Attempt, *, beside: bool) -> Path:
    """Leave word of a command that was refused, `beside` the run's record if there is one or another is to write it; where.

    That must not be replaced: whoever holds the run would think it had lost it. Raises StorageError, OSError.
    """
    if not beside:
        with contextlib.suppress(FileExistsError):
            create_file(folder / OUTCOME, _text(attempt).encode())
            return folder / OUTCOME
    _replace(folder / REFUSED, attempt)
    return folder / REFUSED


def note_commit(folder: Path, attempt: str, *, step: int, path: str) -> None:
    """Note the newest checkpoint. Raises StorageError."""
    with _WRITING:
        before = last(folder)
        if before.attempt == attempt:
            write(folder, replace(before, checkpoint={"step": step, "path": path}))


def read(folder: Path) -> dict[str, Any]:
    """The last attempt's record as it stands in the file; `{}` if there is none that can be read."""
    return read_record(folder / OUTCOME)


def newest(folder: Path, *, launcher: str = "") -> dict[str, Any]:
    """For launchers: how the last command ended, be it an attempt or refused.

    launcher: whose records are read, if that is given; a record that names none may be anybody's, and is read, too.
    """
    records = (read_record(folder / OUTCOME), read_record(folder / REFUSED))
    own = [record for record in records if not launcher or record.get("launcher", launcher) == launcher]
    return max(own, key=lambda record: float(record.get("time", 0.0)), default={})


def start_before(folder: Path, attempt: str) -> Attempt:
    """The last start before `attempt` that never had the run, unless an attempt has had it since."""
    run, refused = last(folder), Attempt.of(read_record(folder / REFUSED))
    for start in (refused, run if not run.token else Attempt()):
        if start.attempt not in ("", attempt) and start.token == run.token:
            return start
    return Attempt(token=run.token)


def read_record(path: Path) -> dict[str, Any]:
    """The entries of a record file that an attempt has, each of its type; `{}` if it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return _known(record) if isinstance(record, dict) else {}


def _replace(path: Path, attempt: Attempt) -> None:
    text = _text(attempt)
    replace_file(path, lambda draft: draft.write_text(text))


def _text(attempt: Attempt) -> str:
    own = {"host": socket.gethostname(), "time": round(time.time(), 3), "launcher": record_name()}
    record = {key: value for key, value in asdict(replace(attempt, **own)).items() if value is not None}  # type: ignore[arg-type]
    return (
        json.dumps(redacted_all({"outcome": attempt.outcome, "exit_code": attempt.exit_code} | record), indent=1) + "\n"
    )


_TYPES: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind) for name, kind in get_type_hints(Attempt, include_extras=True).items()
}


def _known(record: Mapping[str, Any]) -> dict[str, Any]:
    known = {}
    for each in fields(Attempt):
        value = record.get(each.name)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        with contextlib.suppress(ValidationError):
            if value is not None:
                known[each.name] = _TYPES[each.name].validate_python(value, strict=True)
    return known
