"""The results of runs, and the best run of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.checkpoint.records import is_better, read_best
from muster.errors import ConfigError
from muster.loggers.jsonl import NAME, read

COORDINATES = ("kind", "step", "epoch")
OF_A_RUN = (NAME, "config.yaml", "model.pt", "checkpoints")
"""Files of which a run's folder has at least one."""
DEFAULT_METRICS = ("loss", "train loss")
"""Metrics that runs without `checkpoint.best` are compared by: the first that one of them has."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The values of one run.

    step, values: of the evaluation that `checkpoint.best` chose, else of the last one; without evaluations, of the last
        `train` line, as `train loss`.
    metric: the metric of `checkpoint.best`; empty without it.
    """

    folder: Path
    step: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    metric: str = ""

    @classmethod
    def of(cls, folder: Path) -> Result:
        """Read the result of the run in `folder`. A run that has measured nothing has no values."""
        lines, best = read(folder / NAME), read_best(folder)
        evaluations = [line for line in lines if line["kind"] == "eval"]
        if best:
            at_best = [line for line in evaluations if line["step"] == best.step]
            values = {**_values(at_best[-1] if at_best else {}), best.metric: best.value}
            return cls(folder=folder, step=best.step, values=values, metric=best.metric)
        if evaluations:
            return cls(folder=folder, step=evaluations[-1]["step"], values=_values(evaluations[-1]))
        losses = [line for line in lines if line["kind"] == "train"]
        if losses:
            return cls(folder=folder, step=losses[-1]["step"], values={"train loss": losses[-1]["loss"]})
        return cls(folder=folder)

    def value(self, metric: str) -> float:
        """Return the value of `metric`; NaN if the run has none."""
        value = self.values.get(metric)
        return math.nan if value is None else float(value)


def metric_of(results: Sequence[Result]) -> str:
    """Return the metric to compare runs by: that of `checkpoint.best` if all use the same one, else the loss."""
    chosen = {each.metric for each in results if each.values}
    if len(chosen) == 1 and (metric := chosen.pop()):
        return metric
    return next((name for name in DEFAULT_METRICS if any(name in each.values for each in results)), "")


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results with the best first; those without a finite value come last, in their order."""
    metric = metric_of(results)
    sign = 1 if is_better(metric, 0.0, 1.0) else -1
    values = {id(each): each.value(metric) for each in results}
    return sorted(results, key=lambda each: (not math.isfinite(values[id(each)]), sign * _finite(values[id(each)])))


def runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the run folders in it, sorted by name."""
    if (folder / NAME).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{NAME}"))


def best_in(folder: Path) -> tuple[Result, str] | None:
    """Return the best run of the sweep in `folder`, and a line that says why; None if the folder is not a sweep's.

    Raises:
        ConfigError: no run in it has a finite loss or metric.
    """
    runs = [] if any((folder / name).exists() for name in OF_A_RUN) else runs_in(folder)
    if not runs:
        return None
    results = [Result.of(run) for run in runs]
    metric, best = metric_of(results), ranked(results)[0]
    value = best.value(metric)
    if not math.isfinite(value):
        raise ConfigError(f"{folder} holds {len(runs)} runs, and none has a finite loss or metric: give one of them")
    by = f"the best by {metric} ({value:.4g} at step {best.step})"
    return best, f"muster: {folder} holds {len(runs)} runs: taking {best.folder}, {by}"


def _values(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in COORDINATES}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
