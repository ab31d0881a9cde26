"""The results of runs, and the best run of a sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster import outcome
from muster.checkpoint.schemas import direction, read_best
from muster.errors import ConfigError
from muster.loggers.jsonl import NAME, read
from muster.outcome import Outcome

COORDINATES = ("kind", "step", "epoch")
OF_A_RUN = (NAME, "config.yaml", "model.pt", "checkpoints")
"""A run's folder has at least one of these."""
RECORDS = (NAME, outcome.OUTCOME)
"""Files of a claimed run; one that failed before it began has the second alone."""
DEFAULT_METRICS = ("loss", "train loss")
"""Without `checkpoint.best`, runs are compared by the first that one of them has."""

UNENDED, FAILED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """The values of one run.

    step, values: of the evaluation that `checkpoint.best` chose, else of the last one; without evaluations, of the last `train` line,
        as `train loss`.
    metric, mode: of `checkpoint.best`, with `min` or `max`; empty without it.
    standing: 0 if the run is done, or nothing says how it ended; UNENDED; FAILED.
    """

    folder: Path
    step: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    metric: str = ""
    mode: str = ""
    standing: int = 0

    @classmethod
    def of(cls, folder: Path, lines: Sequence[dict[str, Any]] | None = None) -> Result:
        """A run that has measured nothing has no values. `lines`: those of its metrics.jsonl, if read already."""
        lines, best = read(folder / NAME) if lines is None else lines, read_best(folder)
        standing = _standing(outcome.last(folder).outcome)
        evaluations = [line for line in lines if line["kind"] == "eval"]
        if best:
            at_best = [line for line in evaluations if line["step"] == best.step]
            values = {**_values(at_best[-1] if at_best else {}), best.metric: best.value}
            return cls(
                folder=folder, step=best.step, values=values, metric=best.metric, mode=best.mode, standing=standing
            )
        if evaluations:
            return cls(folder=folder, step=evaluations[-1]["step"], values=_values(evaluations[-1]), standing=standing)
        losses = [line for line in lines if line["kind"] == "train"]
        if losses:
            return cls(
                folder=folder, step=losses[-1]["step"], values={"train loss": losses[-1]["loss"]}, standing=standing
            )
        return cls(folder=folder, standing=standing)

    def value(self, metric: str) -> float:
        """Return NaN if the run has none."""
        value = self.values.get(metric)
        return math.nan if value is None else float(value)


def metric_of(results: Sequence[Result]) -> str:
    """Return the metric to compare by: that of `checkpoint.best` if all use the same, else one of DEFAULT_METRICS; empty without one."""
    chosen = {each.metric for each in results if each.values and each.standing < FAILED} or {
        each.metric for each in results if each.values
    }
    if len(chosen) == 1 and (metric := chosen.pop()):
        return metric
    return next((name for name in DEFAULT_METRICS if any(name in each.values for each in results)), "")


def ranked(results: Sequence[Result]) -> list[Result]:
    """Sort with the best first; equal ones by the numbers in their folders' names.

    A run that has not ended, then one that has failed, is behind all that are done; one without a finite value comes last.
    """
    metric = metric_of(results)
    modes = {each.mode for each in results if each.metric == metric and each.mode} or {direction(metric)}
    sign = 1 if modes == {"min"} else -1

    def place(each: Result) -> tuple[Any, ...]:
        value = each.value(metric)
        return not math.isfinite(value), each.standing, sign * _finite(value), _by_numbers(each.folder)

    return sorted(results, key=place)


def runs_in(folder: Path) -> list[Path]:
    """Return the folder if it is a run's, else the runs in it, sorted by name."""
    if (folder / NAME).exists():
        return [folder]
    return sorted({path.parent for name in RECORDS for path in folder.glob(f"*/{name}")})


def best_in(folder: Path) -> tuple[Result, str] | None:
    """Return a sweep's best run, and a line that says why; None if the folder is not a sweep's.

    Raises ConfigError: no run has a finite loss or metric.
    """
    runs = [] if any((folder / name).exists() for name in OF_A_RUN) else runs_in(folder)
    if not runs:
        return None
    results = [Result.of(run) for run in runs]
    metric, best = metric_of(results), ranked(results)[0]
    value = best.value(metric)
    if not metric and (names := sorted({name for each in results for name in each.values})):
        raise ConfigError(
            f"{folder} holds {len(runs)} runs, which measure {', '.join(names)} and no loss: run the sweep with "
            f"checkpoint.best={names[0]}, or give one of its runs"
        )
    if not math.isfinite(value):
        raise ConfigError(f"{folder} holds {len(runs)} runs, and none has a finite loss or metric: give one of them")
    by = f"the best by {metric} ({value:.4g} at step {best.step})"
    return best, f"muster: {folder} holds {len(runs)} runs: taking {best.folder}, {by}"


def _standing(of: str) -> int:
    if of in (outcome.RUNNING, outcome.PREEMPTED):
        return UNENDED
    return 0 if of in (outcome.DONE, Outcome().outcome) else FAILED


def _by_numbers(folder: Path) -> list[tuple[int, str]]:
    """Sort seed-2 before seed-10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", folder.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _values(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in COORDINATES}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
