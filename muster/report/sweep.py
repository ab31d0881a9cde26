"""The results of a sweep's jobs as a table at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from muster.loggers.jsonl import NAME, read

COORDINATES = ("kind", "step", "epoch")


class SweptJob(NamedTuple):
    """A job: its folder if its config was accepted, its exit code, and its value of each swept key."""

    folder: str | None
    exit_code: int
    values: Mapping[str, str]


def print_table(jobs: Sequence[SweptJob]) -> None:
    """Print a row per job: the values of its last evaluation, or its last loss. No column is cut off at any width."""
    rows = [(job, *_last(job.folder)) for job in jobs]
    keys = list(dict.fromkeys(key for job in jobs for key in job.values))
    names = list(dict.fromkeys(name for *_, values in rows for name in values))
    table = Table(*(keys or ["run"]), "exit code", "step", *names)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ignore"
    for job, step, values in rows:
        first = [job.values.get(key, "") for key in keys] if keys else [job.folder or "-"]
        cells = [f"{values[name]:.4g}" if isinstance(values.get(name), float) else "" for name in names]
        table.add_row(*first, str(job.exit_code), step, *cells)
    console = Console(soft_wrap=True)
    widest = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, widest)
    console.print(table)
    if keys and (folders := [job.folder for job in jobs if job.folder]):
        place = os.path.commonpath([Path(folder).parent for folder in folders])
        console.print(f"runs: {place or '.'}", markup=False, highlight=False)


def _last(folder: str | None) -> tuple[str, dict[str, Any]]:
    """Return (step, values) of a run's last evaluation, or else of its last log line."""
    lines = read(Path(folder) / NAME) if folder else []
    ordered = [line for kind in ("eval", "train") for line in reversed(lines) if line["kind"] == kind]
    last: dict[str, Any] = ordered[0] if ordered else {}
    values = {name: value for name, value in last.items() if name not in COORDINATES}
    return str(last.get("step", "")), {"train loss": last["loss"]} if last.get("kind") == "train" else values
