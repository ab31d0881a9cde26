"""The records of an attempt: loggers, times, the report, and how it begins."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster import outcome
from muster.errors import MusterError, one_line, say
from muster.lease.open_folder import RunFolder
from muster.loggers import trainjob
from muster.loggers.base import Logger
from muster.loggers.console import cause_of, console
from muster.loggers.jsonl import NAME, Jsonl, events
from muster.loggers.metrics import Metrics, Rates
from muster.report.page import write_report
from muster.timing.timing_file import Timing
from muster.world.environment import asked_for
from muster.world.group import World


def open_records(
    folder: Path,
    world: World,
    hosts: Sequence[str],
    *,
    name: str,
    step: int,
    samples: int,
    total_steps: int,
    makers: Mapping[str, Callable[..., Logger]],
    progress: str = "auto",
    evaluated: int | None = None,
    rates: Rates = lambda speed, counted: {},
) -> Metrics:
    """Open the records of an attempt at `step`; they do nothing on other ranks than 0.

    hosts: of each rank. step: the last one whose line is written, if it was due. samples: of the steps done. total_steps: 0 if unknown.
    makers: create further loggers, from `folder`, `name`, `step` and `total_steps` as keywords; by what users call them.
    progress: how the console shows the steps. evaluated: the last step evaluated, if a later evaluation is repeated: see `Jsonl`.
    rates: see `Metrics`.

    Raises ConfigError, StorageError: a logger cannot be built, or metrics.jsonl cannot be opened.
    """
    if not world.is_first:
        return Metrics([], samples=samples, rates=rates)
    offered = {"folder": folder, "name": name, "step": step, "total_steps": total_steps}
    own = [logger for said, make in makers.items() if (logger := _made(said, make, offered))]
    shown = console(progress, step=step, total_steps=total_steps, earlier=events(folder / NAME))
    status = trainjob.of_environment(step=step, total_steps=total_steps)
    times = Timing(folder, hosts=hosts, attempt=world.attempt, step=step)
    loggers = [Jsonl(folder, step, evaluated=evaluated), shown, *status, *own]
    return Metrics(loggers, samples=samples, windows=times, rates=rates)


def names_of(deaths: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"rank {each['rank']} on {each['host']} ({cause_of(each)})" for each in deaths)


def _made(said: str, make: Callable[..., Logger], offered: dict[str, Any]) -> Logger | None:
    """Return a logger. None: it cannot start, which is printed and does not fail the run."""
    try:
        return make(**offered)
    except MusterError:
        raise
    except Exception as error:
        say(f"muster: {said} cannot start, the run continues without it: {one_line(error)[:200]}")
        return None


def hosts_of(world: World) -> list[str]:
    """Return the host of each rank. Collective."""
    return world.gather(socket.gethostname())


def report(path: Path) -> None:
    """Write report.html. A failure is printed and does not fail the run."""
    try:
        write_report(path)
    except Exception as error:
        say(f"muster: no report.html: {one_line(error)[:300]}; `muster report {path}` writes it again")


NO_RECORD = "it left no record: killed (kill -9, out of memory), or its host was lost"
"""The cause of a restart after an attempt of which nothing was recorded but its beginning."""


def record_start(
    records: Metrics,
    folder: RunFolder,
    world: World,
    *,
    step: int,
    deaths: Sequence[Mapping[str, Any]] = (),
    why_lost: str = "",
    **facts: Any,
) -> None:
    """Write to metrics.jsonl how this attempt begins.

    deaths: of ranks that are restarted in place, if all ranks have gone back to a checkpoint in their processes.
    why_lost: what keeps the others' state from being handed on.
    """
    before, meant = folder.before, asked_for(world.environment.local_world_size)
    if meant and world.size < meant:
        records.event(
            "note", text=f"trains with {world.size} of the {meant} requested ranks: the others have not joined"
        )
    if deaths:
        cause = (
            f"{names_of(deaths)} died, and all ranks went back in their processes{f': {why_lost}' if why_lost else ''}"
        )
        records.event("restart", step=step, after="killed", cause=cause)
    elif before.outcome not in ("none", outcome.DONE, outcome.PREEMPTED):
        silent = NO_RECORD if before.outcome == outcome.RUNNING else None
        records.event("restart", step=step, after=before.outcome, cause=before.error or silent)
    known = {"step": step, "world_size": world.size, "device": str(world.device.type), "attempt": world.attempt}
    if folder.saved is None:
        records.event("start", output_dir=str(folder.path), **known, **facts)
    else:
        records.event("resume", checkpoint=folder.saved.path, **known, **facts)
