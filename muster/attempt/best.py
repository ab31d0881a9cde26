"""The best evaluation of a run, whose checkpoint is kept: `checkpoint.best` of the trainer, `best` of a job's `evaluate`.

It is {metric, value, step, mode}, as in best.json and in a checkpoint's manifest (checkpoint/schemas.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.checkpoint.commit import Saved, Storage
from muster.checkpoint.manager import Checkpoints
from muster.checkpoint.schemas import direction_before, is_better, read_best
from muster.errors import ConfigError, say


def value_of(metric: str, values: Mapping[str, float], *, key: str) -> float:
    """Return the value of `metric` in an evaluation. Raises ConfigError, which names `key`, if it is not measured."""
    if metric not in values:
        raise ConfigError(f"{key}={metric} is not measured: an evaluation measures {', '.join(values)}")
    return values[metric]


def best_of(
    before: dict[str, Any] | None,
    value: float,
    checkpoints: Checkpoints,
    *,
    metric: str,
    mode: str,
    step: int,
    **facts: Any,
) -> dict[str, Any]:
    """Return the best evaluation so far, which is that of `step` if its `value` is better than `before`. Collective.

    One whose checkpoint could not be written does not count: its weights are gone. facts: more about this evaluation.
    """
    if before and checkpoints.has_failed(before["step"]):
        before = checkpoints.best
    if before and not is_better(value, before["value"], mode=mode):
        return before
    return {"metric": metric, "value": value, "step": step, "mode": mode, **facts}


def known_best(folder: Path, saved: Saved, own: Storage) -> dict[str, Any] | None:
    """Return the best evaluation up to `saved`. best.json is read, too: only it has one after the last save.

    own: the run's storage. One whose checkpoint is not there does not count: `saved` may be another run's.
    """
    best, noted, steps = saved.manifest.get("best"), read_best(folder), own.steps()
    if best and noted and (noted.step, noted.metric, noted.value) == (best["step"], best["metric"], best["value"]):
        noted = None  # `saved` may know more of this evaluation
    if noted and noted.step <= saved.step and noted.step in steps and (not best or noted.step >= best["step"]):
        return noted.model_dump(exclude={"path"})
    if best and best["step"] not in steps:
        say(
            f"muster: the best evaluation so far, of step {best['step']}, has no checkpoint in this run: the search for the "
            f"best starts again at step {saved.step}"
        )
        return None
    return best and {**best, "mode": best.get("mode") or direction_before(best["metric"])}


def change_of_search(
    best: dict[str, Any] | None, metric: str, mode: str, *, key: str, step: int, data: str = ""
) -> str:
    """Return the line that says why a value of now is not compared with `best`, so that the search begins anew; empty if it is.

    data: fingerprint of what is evaluated, if it is known.
    """
    if best is None:
        return ""
    why, before = "", best.get("data", "")
    if (best["metric"], best["mode"]) != (metric, mode):
        why = f"was {best['mode']} {best['metric']}"
    elif data and before and data != before:
        why = f"was measured on other data at step {best['step']}"
    return why and f"{key}={metric} ({mode}) {why}: the search for the best starts again at step {step}"
