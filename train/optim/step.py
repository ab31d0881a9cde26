"""Step decay of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from muster.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """Linear warm-up; the factor is multiplied by `factor` after every `every_epochs` epochs."""

    steps_per_epoch: int
    warmup_steps: int
    every_epochs: float
    factor: float

    def __post_init__(self) -> None:
        if self.every_epochs <= 0:
            raise ConfigError(f"scheduler.every_epochs={self.every_epochs} is out of range: use a value above 0")

    def __call__(self, step: int) -> float:
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return float(warm * self.factor ** (step // max(1, round(self.every_epochs * self.steps_per_epoch))))
