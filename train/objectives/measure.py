"""What is measured beside the loss: the objective's own sums, metrics that keep a state, and which value is better."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from train.dist.world import World
from train.errors import ConfigError, MusterError
from train.objectives.by_slice import BySlice, by_slice
from train.objectives.lists import fill_lists
from train.objectives.loss import loss_of, measured
from train.origin import defined, described, is_raised_by_own, kind_and_message, name_of

OF = "/of"
"""What the name of a sum's own count ends with; a sum without one is over samples."""
LESS_IS_BETTER = ("loss", "error", "perplexity")


def sums(
    objective: Any, outputs: Any, targets: Any, count: int, *, model: Any, loss: Tensor | None = None
) -> dict[str, Tensor]:
    """The objective's metrics summed over the micro-batch of `count` samples; of a bare loss function, the loss.

    A metric may be a pair (sum, count) where it is a mean of something else than samples: tokens, pixels.

    loss: what the objective has given for it already; one that keeps a state is not to see a batch twice.
    """
    if not hasattr(objective, "metrics"):
        known = loss_of(objective, outputs, targets, model=model, trains=False) if loss is None else loss
        return {"loss": known * count}
    found: dict[str, Any] = {}
    for name, value in measured(objective, outputs, targets, model=model).items():
        if isinstance(value, tuple) and len(value) == 2:
            found[name], found[f"{name}{OF}"] = value[0], _count(value[1], like=value[0])
        else:
            found[name] = value
    wrong = {name: value for name, value in found.items() if not isinstance(value, Tensor) or value.numel() != 1}
    for name, value in wrong.items():
        raise ConfigError(
            f"{name_of(objective)}.metrics gives {described(value)} for {name.removesuffix(OF)}{defined(objective, 'metrics')}: "
            "give the sum over the samples, a tensor [], or a pair (sum, count) of them"
        )
    return found


def _count(value: Any, *, like: Any) -> Any:
    """A count given as a plain number is a tensor beside its sum."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value), device=like.device) if is_number and isinstance(like, Tensor) else value


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

    def __init__(self, named: Mapping[str, Any], *, sliced: bool = False):
        self.named = {name: by_slice(metric) if sliced else metric for name, metric in named.items()}

    def update(self, outputs: Any, targets: Any, *, slice: int) -> None:
        """Take the outputs for a micro-batch of a slice of the global batch."""
        for name, metric in self.named.items():
            try:
                if isinstance(metric, BySlice):
                    metric.update(outputs, targets, slice=slice)
                else:
                    metric.update(outputs, targets)
            except Exception as error:
                if isinstance(error, MusterError | torch.OutOfMemoryError) or is_raised_by_own(error):
                    raise
                raise _misfit(name, metric, outputs, targets, error) from error

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, copies are updated and computed."""
        kept, self.named = self.named, {name: _copy(metric) for name, metric in self.named.items()}
        try:
            yield
        finally:
            self.named = kept

    def compute(self, world: World) -> dict[str, float]:
        """All values since the last time, by name. Raises ConfigError: one is no number."""
        fill_lists(self.named, world)
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


def _misfit(name: str, metric: Any, outputs: Any, targets: Any, error: Exception) -> ConfigError:
    """A metric without lines of a user's own raised `error`: it got what it does not take."""
    kind = name_of(metric.metric if isinstance(metric, BySlice) else metric)
    remedy = "give it values that it takes, or a class of your own"
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        remedy = f"derive a class from it whose update(outputs, targets) picks the tensors, and write metrics.{name}._target_=package.module.Class"
    return ConfigError(
        f"metrics.{name}: {kind} cannot be updated with outputs that are {described(outputs)} and targets that are {described(targets)} "
        f"({': '.join(kind_and_message(error))[:200]}): {remedy}"
    )


def _copy(metric: Any) -> Any:
    """A copy; itself where it has none: `compute` resets it."""
    try:
        return copy.deepcopy(metric)
    except Exception:
        return metric


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
