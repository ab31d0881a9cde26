"""The steps of a run: the samples of each, their number, and the progress through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.sample_plan import Plan
from muster.train.config.keys import Config
from muster.train.data.load import Data
from muster.train.strategies.base import StepResult

STEPPED, ENDED, LOGGED, EVALUATED, SAVED = range(5)
"""What is done of a step: the optimizer's step, the callbacks, and, if they are due, its log line, evaluation and save."""


@dataclass
class Progress:
    """Progress of a run over all its attempts.

    step: optimizer steps done. evaluated: step of the last complete evaluation. counted: step of the last evaluation that the
        restored state of callbacks has counted.
    skipped_in_a_row: steps skipped since the last one that was not.
    best: {metric, value, step, mode} of the evaluation with the best `checkpoint.best`. stopped: why training ends early.
    logged: step of the last `train` line. timed: what is due by the clock (intervals.py). stage: what is done of this step.
    result: what the strategy has returned for it, if it is known.
    """

    step: int = 0
    evaluated: int = 0
    counted: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, Any] | None = None
    stopped: str | None = None
    logged: int = 0
    timed: dict[str, int] | None = None
    stage: int = SAVED
    result: StepResult | None = None

    @property
    def lines(self) -> int:
        """The last step whose `train` line, if it was due, is written."""
        return self.step if self.stage >= LOGGED else self.step - 1

    def advance(self, result: StepResult) -> None:
        self.step, self.stage, self.result = self.step + 1, STEPPED, result


@dataclass(frozen=True, kw_only=True)
class Course:
    data: Data
    plan: Plan
    total_steps: int
    progress: Progress

    @property
    def is_over(self) -> bool:
        """True if all steps are done or training was stopped early."""
        return self.progress.step >= self.total_steps or self.progress.stopped is not None


def plan_of(config: Config, data: Data) -> Plan:
    batch_size, drop_last = min(config.batch_size, len(data.train)), config.loader.drop_last
    size, shuffle = len(data.train), data.shuffles
    return Plan(size, batch_size, config.seed, shuffle=shuffle, drop_last=drop_last, weights=data.weights)


def steps_asked_for(config: Config, plan: Plan) -> int:
    return config.max_steps or config.epochs * plan.steps_per_epoch
