"""The table of results at a sweep's end."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from muster.errors import ConfigError, Held
from muster.report.results import FAILED, Result, metric_of, ranked


class SweptJob(NamedTuple):
    """`folder`: None if the config was not accepted. `values`: of each swept key."""

    folder: str | None
    exit_code: int
    values: Mapping[str, str]


def print_table(jobs: Sequence[SweptJob]) -> None:
    """Print a row per job (see `Result`), the best first, and the columns that differ. No column is cut off at any width."""
    results = {id(job): _result(job) for job in jobs}
    order = [id(result) for result in ranked([*results.values()])]
    rows = sorted(jobs, key=lambda job: order.index(id(results[id(job)])))
    metric = metric_of([*results.values()])
    first = results[id(rows[0])]
    best = rows[0] if not first.standing and math.isfinite(first.value(metric)) else None
    columns = _columns(rows, [results[id(job)] for job in rows], metric)
    if best:
        columns[""] = ["best" if job is best else "" for job in rows]
    table = Table(*columns)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ignore"
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console = Console(soft_wrap=True)
    widest = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, widest)
    console.print(table)
    if folders := [job.folder for job in jobs if job.folder]:
        place = os.path.commonpath([Path(folder).parent for folder in folders])
        console.print(f"runs: {place or '.'}", markup=False, highlight=False)
    if best:
        found = results[id(best)]
        value = f"{metric} {found.value(metric):.4g} at step {found.step}"
        console.print(f"best: {best.folder} ({value})", markup=False, highlight=False)


def _result(job: SweptJob) -> Result:
    """A job that was refused has no result, whatever run its folder holds."""
    if not job.folder or job.exit_code in (ConfigError.exit_code, Held.exit_code):
        return Result(folder=Path(job.folder or ""), standing=FAILED)
    return Result.of(Path(job.folder))


def _columns(jobs: Sequence[SweptJob], results: Sequence[Result], metric: str) -> dict[str, list[str]]:
    """Return title -> cells of the columns that differ; always with `metric`, and one that names the job."""
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    names = dict.fromkeys(name for result in results for name in result.values)
    swept = {key: [job.values.get(key, "") for job in jobs] for key in keys}
    first = {key: cells for key, cells in swept.items() if _differ(cells)} or {
        "run": [job.folder or "-" for job in jobs]
    }
    others = {
        "exit code": [str(job.exit_code) for job in jobs],
        "step": ["" if result.step is None else str(result.step) for result in results],
    }
    if all(job.exit_code for job in jobs):
        first["exit code"] = others.pop("exit code")
    measured = {name: [_cell(result.values.get(name)) for result in results] for name in names}
    shown = {name: cells for name, cells in (others | measured).items() if _differ(cells) or name == metric}
    return first | shown


def _differ(cells: Sequence[str]) -> bool:
    return len({*cells}) > 1


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
