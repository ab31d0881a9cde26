"""What is measured beside the loss: the objective's own sums, metrics that keep a state, and which value is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from train.errors import ConfigError

OF = "/of"
"""What the name of a sum's own count ends with; a sum without one is over samples."""
LESS_IS_BETTER = ("loss", "error", "perplexity")


def sums(objective: Any, outputs: Any, targets: Any, count: int) -> dict[str, Tensor]:
    """The objective's metrics summed over the micro-batch of `count` samples; of a bare loss function, the loss.

    A metric may be a pair (sum, count) where it is a mean of something else than samples: tokens, pixels.
    """
    if not hasattr(objective, "metrics"):
        return {"loss": objective(outputs, targets) * count}
    found: dict[str, Tensor] = {}
    for name, value in objective.metrics(outputs, targets).items():
        if isinstance(value, tuple):
            found[name], found[f"{name}{OF}"] = value
        else:
            found[name] = value
    return found


def means(totals: Mapping[str, float], *, count: int) -> dict[str, float]:
    """Of sums over all ranks, by `SLICE/name` or `name`, each in the order of its slices."""
    added: dict[str, float] = {}
    for key, total in totals.items():
        name = key.partition("/")[2] if key.partition("/")[0].isdigit() or key.startswith("/") else key
        added[name] = added.get(name, 0.0) + total
    return {
        name: _ratio(total, added.get(f"{name}{OF}", count)) for name, total in added.items() if not name.endswith(OF)
    }


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


class Measures:
    """Metrics of `metrics.NAME`, as torchmetrics has them: `update(outputs, targets)`, `compute()`, `reset()`.

    They add up their own states over the ranks in `compute`, which is collective; what it gives is a number, or several
    by name.
    """

    def __init__(self, named: Mapping[str, Any]):
        self.named = dict(named)

    def update(self, outputs: Any, targets: Any) -> None:
        for metric in self.named.values():
            metric.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """All values since the last time, by name. Raises ConfigError: one is no number."""
        found: dict[str, float] = {}
        for name, metric in self.named.items():
            value = metric.compute()
            each = {f"{name}_{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
            for key, one in each.items():
                try:
                    found[key] = float(one)
                except (TypeError, ValueError, RuntimeError):
                    raise ConfigError(
                        f"metrics.{name} gives {key} of more than one number: choose an average of them"
                    ) from None
            metric.reset()
        return found

    def reset(self) -> None:
        """Forget what was measured in an evaluation that was given up."""
        for metric in self.named.values():
            metric.reset()


def value_of(metric: str, values: Mapping[str, float], *, key: str) -> float:
    """The value of `metric` in an evaluation. Raises ConfigError: it has none of that name; `key` asked for it."""
    if metric not in values:
        raise ConfigError(f"{key}={metric} is not measured: an evaluation gives {', '.join(values)}")
    return values[metric]


def is_better(metric: str, value: float, best: float, *, by: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than so much; nan is worse than all.

    Of `loss`, `error`, `perplexity`, and names that end so, less is better; of all others more.
    """
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    return value < best - by if metric.endswith(LESS_IS_BETTER) else value > best + by
