"""The configured schedule: the values of the optimizer's groups as a pure function of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from muster.code_location import located
from muster.errors import ConfigError
from muster.train.config.parts import Part, bound, build, locate, signature

OWN = {"params", "lr", "initial_lr"}
"""Keys of a parameter group that are not options: its parameters and rates."""
KEPT = 256
"""Number of steps to remember: an asynchronous trainer may have gradients from earlier steps."""
REHEARSED = 10_000
"""Maximum number of steps that a scheduler takes before the run begins, in a few tenths of a second."""


def build_schedule(part: Part, *, lr: float | None, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Build the schedule of `scheduler`: a function of the step, or a class of torch.optim.lr_scheduler.

    Raises ConfigError: it cannot be built, or depends on more than the step.
    """
    target = locate(part)
    if inspect.isclass(target) and issubclass(target, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler._target_={part.target} follows a metric, but a schedule here is a function of the step: use another"
        )
    if inspect.isclass(target) and issubclass(target, LRScheduler):
        return TorchSchedule(part, lr=lr or 1.0, total_steps=total_steps)
    schedule: Callable[[int], float] = bound(part, free=1, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    return schedule


def follow(schedule: Callable[[int], float], optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """Return a function that sets the optimizer's groups, which must be as they were built, to `schedule` at a step."""
    if isinstance(schedule, TorchSchedule):
        return schedule.over(optimizer).apply

    def apply(step: int) -> None:
        factor = schedule(step)
        for group in optimizer.param_groups:
            if "initial_lr" in group:  # an optimizer may have no rate
                group["lr"] = group["initial_lr"] * factor

    return apply


def base_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the rate that the optimizer was built with, regardless of the groups' own; None if it has no rate."""
    rates = [getattr(optimizer, "defaults", {}).get("lr"), *(group.get("lr") for group in optimizer.param_groups)]
    return next((float(rate) for rate in rates if rate is not None), None)


def adapt(schedule: Callable[[int], float], optimizer: torch.optim.Optimizer, *, total_steps: int) -> set[str]:
    """Base `schedule` on the optimizer as built; return the options of its groups, beside the rates, that it changes.

    Raises ConfigError: the schedule would change a rate, and the optimizer has none or one of 0; or it ends before the run.
    """
    rate, kind = base_rate(optimizer), type(optimizer).__name__
    if isinstance(schedule, TorchSchedule):
        if not rate:
            has = "no learning rate" if rate is None else "a learning rate of 0"
            raise ConfigError(f"{schedule.said} sets learning rates, and {kind} has {has}: use scheduler=constant")
        schedule.lr = rate
        return schedule.over(optimizer).rehearse()
    if rate is None and any(schedule(step) != 1 for step in _looked_at(total_steps)):
        raise ConfigError(
            f"the scheduler changes the learning rate, and {kind} has none: use scheduler=constant without a warm-up"
        )
    return set()


def _looked_at(total_steps: int) -> list[int]:
    """Return some steps of a run, including the first and the last."""
    return sorted({number * (total_steps - 1) // 16 for number in range(17)})


class TorchSchedule:
    """Wraps a scheduler of torch. `total_steps` is filled in if it has such a parameter.

    `schedule(step)` returns the factor on `lr` for an optimizer with one group; `over(optimizer)` gives every group torch's values.
    """

    def __init__(self, part: Part, *, lr: float, total_steps: int):
        self.part, self.lr, self.total_steps = part, lr, total_steps
        self.said = f"scheduler._target_={part.target}"
        self._single: tuple[float, Replay] | None = None

    def over(self, optimizer: torch.optim.Optimizer) -> Replay:
        """Return the scheduler on the groups of `optimizer`. Raises ConfigError if it rejects them or its values."""
        return Replay(self.part, optimizer, lr=self.lr, total_steps=self.total_steps)

    def __call__(self, step: int) -> float:
        if self._single is None or self._single[0] != self.lr:
            one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.lr, momentum=0.9)
            self._single = self.lr, self.over(one)
        return float(self._single[1].at(step)[0]["lr"]) / self.lr


class Shadow(torch.optim.Optimizer):
    """Holds the groups of another optimizer as built, with dummy parameters. `lr` is for groups without a rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, lr: float):
        groups = [
            {
                **{name: value for name, value in group.items() if name not in OWN},
                "lr": float(group.get("initial_lr", lr)),
                "params": [torch.zeros(1, requires_grad=True)],
            }
            for group in optimizer.param_groups
        ]
        options = {name: value for group in groups for name, value in group.items() if name not in OWN}
        super().__init__(groups, {**options, **getattr(optimizer, "defaults", {})})  # a divided optimizer's are empty

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: a scheduler only checks that it was called."""


class Replay:
    """Steps a torch scheduler on a shadow of the optimizer, from the run's first step in every attempt.

    Options that the scheduler sets in a group beside the rate (momentum, betas) are included.
    """

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer, *, lr: float, total_steps: int):
        self._part, self._optimizer, self._steps = part, optimizer, total_steps
        self._shadow = Shadow(optimizer, lr=lr)
        self._built = [dict(group) for group in self._shadow.param_groups]
        self._restart()

    def at(self, step: int) -> list[dict[str, Any]]:
        """Return each group's rate and changed options at `step`. Raises ConfigError if the scheduler ends before."""
        if step not in self._values:
            if step < self._done:
                self._restart()
            while self._done < min(step, self._steps - 1):  # some schedulers raise if stepped further
                self._advance()
        return self._values.get(step, self._values[self._done])

    def apply(self, step: int) -> None:
        """Set the optimizer's groups for `step`, except those without a rate."""
        for group, values in zip(self._optimizer.param_groups, self.at(step), strict=False):  # a model may add groups
            rate = group.get("initial_lr")
            if rate is not None:
                group.update({name: value for name, value in values.items() if name in group})
                if isinstance(rate, torch.Tensor):
                    group["lr"] = torch.full_like(rate, values["lr"])

    def rehearse(self) -> set[str]:
        """Step ahead and return the options that the scheduler changes. Raises ConfigError if it ends too early."""
        ends = getattr(self._scheduler, "total_steps", None)  # OneCycleLR raises only at the step after that
        if isinstance(ends, int) and ends + 1 < self._steps:
            raise self._too_short(ends)
        self.at(min(self._steps, REHEARSED) - 1)
        return set().union(*self._changed)

    def _restart(self) -> None:
        for group, before in zip(self._shadow.param_groups, self._built, strict=True):
            group.clear()
            group.update(before)
        self._changed = [set[str]() for _ in self._built]
        given = {"epochs", "total_steps"} & {*self._part.values}
        offered: dict[str, Any] = {} if given else {"total_steps": self._steps}
        if not {"momentum", "betas"} & self._shadow.defaults.keys():  # the optimizer has no momentum to cycle
            offered["cycle_momentum"] = False
        self._scheduler = build(self._part, self._shadow, **offered)
        self._done, self._values = 0, {0: self._read()}

    def _advance(self) -> None:
        self._shadow.step()
        try:
            self._scheduler.step()
        except Exception as error:
            raise self._too_short(self._done + 1, f" ({located(error)})") from error
        self._done += 1
        self._values[self._done] = self._read()
        self._values.pop(self._done - KEPT, None)

    def _read(self) -> list[dict[str, Any]]:
        found = []
        for group, before, changed in zip(self._shadow.param_groups, self._built, self._changed, strict=True):
            changed |= {name for name in before.keys() - OWN if group[name] is not before[name]}
            found.append({"lr": float(group["lr"]), **{name: group[name] for name in changed}})
        return found

    def _too_short(self, steps: int, reason: str = "") -> ConfigError:
        said = f"{self._part.target} ends after {steps} steps, and the run has {self._steps}{reason}"
        if "total_steps" not in signature(locate(self._part)):
            return ConfigError(f"{said}: give max_steps={steps}, or another scheduler")
        key = f"{self._part.key}.total_steps"
        given = [name for name in ("total_steps", "epochs", "steps_per_epoch") if name in self._part.values]
        return ConfigError(
            f"{said}: write {key}={self._steps}, or leave out {' and '.join(given)} to have it filled in"
        )
