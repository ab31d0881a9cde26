"""Learning-rate schedules: the factor on each group's base rate, a pure function of the step, so nothing to save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch

from train.config.parts import build
from train.config.schema import Component, Precision
from train.errors import ConfigError


@dataclass(frozen=True)
class Constant:
    """1, after a linear warm-up over `warmup_steps`."""

    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `final_factor` at the run's last step.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.
    """

    total_steps: int
    warmup_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"scheduler.warmup_steps={self.warmup_steps} must be below the run's {self.total_steps} steps"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + cos(pi * min(1.0, done)))


@dataclass(frozen=True)
class Step:
    """Linear warm-up; times `factor` after every `every_epochs` epochs."""

    steps_per_epoch: int
    warmup_steps: int = 0
    every_epochs: float = 30.0
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every_epochs <= 0:
            raise ConfigError(f"scheduler.every_epochs={self.every_epochs} is out of range: use a value above 0")

    def __call__(self, step: int) -> float:
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return float(warm * self.factor ** (step // max(1, round(self.every_epochs * self.steps_per_epoch))))


def build_optimizer(
    component: Component, parameters: Iterable[torch.nn.Parameter], *, precision: Precision
) -> torch.optim.Optimizer:
    """The configured optimizer over `parameters`, in its fused form where torch has one for CPU and CUDA alike.

    Not under fp16: the loss scaler lets a fused SGD skip its first step, and its momentum is uninitialised after that.
    """
    fused = (
        component._target_ in ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
        and precision is not Precision.fp16
    )
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to optimise")
    optimizer: Any = build(component, trainable, key="optimizer", **({"fused": True} if fused else {}))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer  # type: ignore[no-any-return]
