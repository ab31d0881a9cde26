"""An end to training when evaluations get no better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from train.callbacks.base import Callback
from train.config.marks import Ge
from train.objectives.measure import is_better, value_of

if TYPE_CHECKING:
    from train.loop import Run


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without `metric` having become better by more than `min_delta`."""

    needs_evaluations = True

    def __init__(self, *, metric: str, patience: Annotated[int, Ge(1)], min_delta: Annotated[float, Ge(0)]):
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self._best, self._waited = math.nan, 0

    def on_start(self, run: Run) -> None:
        self._decide(run)

    def on_trial(self, values: dict[str, float]) -> None:
        value_of(self.metric, values, key="callbacks.early_stopping.metric")

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        value = value_of(self.metric, values, key="callbacks.early_stopping.metric")
        if is_better(self.metric, value, self._best, by=self.min_delta):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._decide(run)

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self._best, "waited": self._waited}

    def load(self, state: dict[str, Any]) -> None:
        if state.get("metric", self.metric) == self.metric:  # values of another one say nothing of this
            self._best, self._waited = state["best"], state["waited"]

    def _decide(self, run: Run) -> None:
        if self._waited >= self.patience:
            run.stop(f"{self.metric} has not been better than {self._best:.4g} for {self._waited} evaluations")
