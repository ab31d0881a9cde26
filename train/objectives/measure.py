"""Metrics beside the loss: the objective's sums, metrics with state, and which value is better."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.records import lower_is_better
from muster.dist.world import World
from muster.errors import ConfigError, MusterError
from muster.origin import defined, described, is_raised_by_own, kind_and_message, name_of
from muster.train.objectives.by_slice import BySlice, by_slice
from muster.train.objectives.lists import fill_lists
from muster.train.objectives.loss import loss_of, measured

OF = "/of"
"""Suffix of the name of a sum's own count; a sum without such a count is over samples."""


def sums(
    objective: Any, outputs: Any, targets: Any, count: int, *, model: Any, loss: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the objective's metrics summed over the `count` samples of a micro-batch; for a bare loss function, the
    loss.

    A metric may be a pair (sum, count) if it is a mean over something other than samples, such as tokens or pixels.

    loss: the loss that the objective already returned for this micro-batch; one with state must not see a batch twice.
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
            f"{name_of(objective)}.metrics returns {described(value)} for {name.removesuffix(OF)}{defined(objective, 'metrics')}: "
            "give the sum over the samples, a tensor [], or a pair (sum, count) of them"
        )
    return found


def _count(value: Any, *, like: Any) -> Any:
    """Convert a count given as a plain number to a tensor on the device of its sum."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value), device=like.device) if is_number and isinstance(like, Tensor) else value


def means(totals: Mapping[str, float], *, count: int) -> dict[str, float]:
    """Divide sums over all ranks by their own counts, or by `count`; NaN if the count is 0.

    Keys are `SLICE/name` or `name`. The slices of each name are added in the order given.
    """
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
    """Metrics of `metrics.NAME` with the interface of torchmetrics: `update(outputs, targets)`, `compute()`, `reset()`.

    Their `compute` adds up their states over the ranks and is collective. It returns a number, or several by name.
    """

    def __init__(self, named: Mapping[str, Any], *, sliced: bool = False):
        self.named = {name: by_slice(metric) if sliced else metric for name, metric in named.items()}

    def update(self, outputs: Any, targets: Any, *, slice: int) -> None:
        """Update all metrics with the outputs for a micro-batch of a slice of the global batch."""
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
        """Update and compute copies of the metrics inside the context."""
        kept, self.named = self.named, {name: _copy(metric) for name, metric in self.named.items()}
        try:
            yield
        finally:
            self.named = kept

    def compute(self, world: World) -> dict[str, float]:
        """Return all values since the last reset by name, and reset. Collective: every rank must call it.

        Raises:
            ConfigError: a value is not a number.
        """
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
                        f"metrics.{name} has more than one number for {key}: choose an average of them"
                    ) from None
            metric.reset()
        return found

    def reset(self) -> None:
        """Discard the state of an aborted evaluation."""
        for metric in self.named.values():
            metric.reset()


def _misfit(name: str, metric: Any, outputs: Any, targets: Any, error: Exception) -> ConfigError:
    """Return the error for a metric that does not accept its inputs, if no user code was involved in `error`."""
    kind = name_of(metric.metric if isinstance(metric, BySlice) else metric)
    remedy = "give it values that it accepts, or use a class of your own"
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        remedy = f"derive a class from it whose update(outputs, targets) picks the tensors, and write metrics.{name}._target_=package.module.Class"
    return ConfigError(
        f"metrics.{name}: {kind} cannot be updated with outputs that are {described(outputs)} and targets that are {described(targets)} "
        f"({': '.join(kind_and_message(error))[:200]}): {remedy}"
    )


def _copy(metric: Any) -> Any:
    """Return a copy, or the metric itself if it cannot be copied: `compute` resets it."""
    try:
        return copy.deepcopy(metric)
    except Exception:
        return metric


def value_of(metric: str, values: Mapping[str, float], *, key: str) -> float:
    """Return the value of `metric` in an evaluation. Raises ConfigError, which names `key`, if it is not measured."""
    if metric not in values:
        raise ConfigError(f"{key}={metric} is not measured: an evaluation measures {', '.join(values)}")
    return values[metric]


def is_better(metric: str, value: float, best: float, *, by: float = 0.0) -> bool:
    """Return True if `value` is better than `best` by more than `by`; NaN is worse than any number.

    See `lower_is_better` for the direction.
    """
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    return value < best - by if lower_is_better(metric) else value > best + by
