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
        return TorchSchedule(part, lr=lr or 1.0, total_steps=total_steps)
    schedule: Callable[[int], float] = bound(part, free=1, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    return schedule


def base_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The rate that the optimizer was built with; of groups with other rates that of the rest. None if it has no rate."""
    rates = [getattr(optimizer, "defaults", {}).get("lr"), *(group.get("lr") for group in optimizer.param_groups)]
    return next((float(rate) for rate in rates if rate is not None), None)


def adapt(schedule: Callable[[int], float], optimizer: torch.optim.Optimizer, *, total_steps: int) -> None:
    """Base `schedule` on the rate of the optimizer as it was built.

    Raises:
        ConfigError: the optimizer has no rate, or one of zero, that the schedule could change.
    """
    rate, kind = base_rate(optimizer), type(optimizer).__name__
    if isinstance(schedule, TorchSchedule):
        if not rate:
            has = "no learning rate" if rate is None else "a learning rate of 0"
            raise ConfigError(f"{schedule.said} sets learning rates, and {kind} has {has}: use scheduler=constant")
        schedule.start_from(rate)
    elif rate is None and any(schedule(step) != 1 for step in _looked_at(total_steps)):
        raise ConfigError(
            f"the scheduler changes the learning rate, and {kind} has none: use scheduler=constant without a warm-up"
        )


def _looked_at(total_steps: int) -> list[int]:
    """Some steps of a run, the first and the last among them."""
    return sorted({number * (total_steps - 1) // 16 for number in range(17)})


class TorchSchedule:
    """What one of torch's schedulers makes of the base rate, stepped once an optimizer step.

    It runs on an optimizer of its own, from the run's first step however often the run is resumed; of what it cycles
    only the learning rate is taken, not momentum. `total_steps` is filled in where it has such a parameter.
    """

    def __init__(self, part: Part, *, lr: float, total_steps: int):
        self._part, self._steps, self.said = part, total_steps, f"scheduler._target_={part.target}"
        self.start_from(lr)

    def start_from(self, lr: float) -> None:
        """Begin anew with this base rate: some schedulers set rates of their own, whatever the base. Raises ConfigError."""
        self._base, self._factors = lr, list[float]()
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
        given = {"epochs", "total_steps"} & {*self._part.values}
        offered: dict[str, Any] = {} if given else {"total_steps": self._steps}
        self._scheduler = build(self._part, self._optimizer, **offered)

    def __call__(self, step: int) -> float:
        while len(self._factors) <= step:
            self._factors.append(float(self._optimizer.param_groups[0]["lr"]) / self._base)
            if len(self._factors) < self._steps:  # some refuse to be stepped further
                self._optimizer.step()
                self._scheduler.step()
        return self._factors[step]
