"""An objective's metrics, whatever kind of objective it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def sums(objective: Any, outputs: Any, targets: Any, count: int) -> dict[str, Tensor]:
    """The objective's metrics summed over the micro-batch of `count` samples; of a bare loss function, the loss."""
    if hasattr(objective, "metrics"):
        metrics: dict[str, Tensor] = objective.metrics(outputs, targets)
        return metrics
    return {"loss": objective(outputs, targets) * count}
