"""Early stopping when evaluations no longer improve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from muster.attempt.best import value_of
from muster.checkpoint.schemas import direction_before, is_better
from muster.train.callbacks.base import Callback
from muster.train.config.constraints import Ge

if TYPE_CHECKING:
    from muster.train.loop import Run


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row in which `metric` did not improve by more than `min_delta`.

    mode: `min` if less of the metric is better, `max` if more is; `auto`: as the metric or its name says.
    """

    needs_evaluations = True

    def __init__(
        self,
        *,
        metric: str,
        patience: Annotated[int, Ge(1)],
        min_delta: Annotated[float, Ge(0)],
        mode: Literal["auto", "min", "max"] = "auto",
    ):
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self._mode: str = mode
        self._restored = ""
        self._best, self._waited = math.nan, 0

    def on_start(self, run: Run) -> None:
        """Stop at once if the restored state has used up the patience. Raises ConfigError."""
        self._see_mode(run)
        self._decide(run)

    def on_trial(self, values: dict[str, float]) -> None:
        """Raises ConfigError: evaluations do not measure `metric`."""
        value_of(self.metric, values, key="callbacks.early_stopping.metric")

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        self._see_mode(run)
        if run.is_evaluated_again and not math.isnan(self._best):  # the restored state has a value, and has counted it
            return
        value = value_of(self.metric, values, key="callbacks.early_stopping.metric")
        if is_better(value, self._best, mode=self._mode, by=self.min_delta):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._decide(run)

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self._best, "waited": self._waited, "mode": self._mode}

    def load(self, state: dict[str, Any]) -> None:
        if state.get("metric", self.metric) == self.metric:  # values of different metrics cannot be compared
            self._best, self._waited = state["best"], state["waited"]
            self._restored = state.get("mode") or direction_before(self.metric)

    def _see_mode(self, run: Run) -> None:
        """Find which value is the best; what was waited for in the other direction does not count. Raises ConfigError."""
        key, mode_key = "callbacks.early_stopping.metric", "callbacks.early_stopping.mode"
        found = {"key": key, "mode_key": mode_key, "mode": self._mode, "recorded": self._restored}
        self._mode = run.measures.direction(self.metric, **found)
        if self._restored not in ("", "auto", self._mode):
            self._best, self._waited = math.nan, 0
        self._restored = ""

    def _decide(self, run: Run) -> None:
        if self._waited >= self.patience:
            run.stop(f"{self.metric} has not been better than {self._best:.4g} for {self._waited} evaluations")
