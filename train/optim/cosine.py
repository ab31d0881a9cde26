"""Cosine decay of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from muster.errors import ConfigError


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `final_factor` at `total_steps`.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.
    """

    total_steps: int
    warmup_steps: int
    final_factor: float

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
