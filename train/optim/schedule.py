"""The configured schedule: the factor on each group's base rate, a pure function of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from train.config.parts import Part, bound, build, locate
from train.errors import ConfigError


def build_schedule(part: Part, *, lr: float | None, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Of `scheduler`: a function of the step, or one of torch's own classes (torch.optim.lr_scheduler).

    Raises:
        ConfigError: it cannot be built, or needs to know more than the step.
    """
    target = locate(part)
    if inspect.isclass(target) and issubclass(target, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler._target_={part.target} follows a metric, and a schedule here is a function of the step: use another"
        )
    if inspect.isclass(target) and issubclass(target, LRScheduler):
        return TorchSchedule(part, lr=1.0 if lr is None else lr, total_steps=total_steps)
    schedule: Callable[[int], float] = bound(part, free=1, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    return schedule


class TorchSchedule:
    """What one of torch's schedulers makes of the base rate, stepped once an optimizer step.

    It runs on an optimizer of its own, from the run's first step however often the run is resumed; of what it cycles
    only the learning rate is taken, not momentum. `total_steps` is filled in where it has such a parameter.
    """

    def __init__(self, part: Part, *, lr: float, total_steps: int):
        self._base = lr
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
        offered: dict[str, Any] = {"total_steps": total_steps} if not {"epochs", "total_steps"} & {*part.values} else {}
        self._scheduler = build(part, self._optimizer, **offered)
        self._factors: list[float] = []
        self._steps = total_steps

    def __call__(self, step: int) -> float:
        while len(self._factors) <= step:
            self._factors.append(float(self._optimizer.param_groups[0]["lr"]) / self._base)
            if len(self._factors) < self._steps:  # some refuse to be stepped further
                self._optimizer.step()
                self._scheduler.step()
        return self._factors[step]
