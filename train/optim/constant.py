"""Constant learning rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A factor of 1 after a linear warm-up over `warmup_steps`."""

    warmup_steps: int

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))
