"""Keep the state of a torchmetrics metric per slice under `virtual_world_size`, and merge it in slice order.

The rounding of a floating-point sum depends on the number of ranks that hold its parts. Here each slice has a copy of
the metric, and torchmetrics merges the copies as it merges those of ranks.
"""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from muster.errors import ConfigError
from muster.train.objectives.reduced import update_watched
from muster.train.objectives.trial import Trial


class BySlice:
    """Keeps one copy per slice of `metric`, the torchmetrics object `metrics.NAME`."""

    def __init__(self, metric: Any, name: str):
        self.metric, self.name = metric, name
        self._copies: dict[int, Any] = {}

    def update(self, outputs: Any, targets: Any, *, slice: int, trial: Trial | None = None) -> None:
        """Update the slice's copy. Raises ConfigError as `update_watched` does."""
        if slice in self._copies:
            self._copies[slice].update(outputs, targets)
            return
        own = self._copies[slice] = copy.deepcopy(self.metric)
        update_watched(own, lambda: own.update(outputs, targets), name=self.name, trial=trial)

    def compute(self) -> Any:
        """Return the value over all slices of all ranks. Collective."""
        mine = {number: each.to("cpu") for number, each in self._copies.items()}
        everybodys: list[Any] = [mine]
        if dist.is_initialized():
            everybodys = [None] * dist.get_world_size()
            dist.all_gather_object(everybodys, mine)
        copies = dict(sorted(pair for of_rank in everybodys for pair in of_rank.items()))
        return together([*copies.values()], name=self.name).compute()

    def reset(self) -> None:
        self._copies = {}


def by_slice(metric: Any, name: str) -> Any:
    """Wrap `metric` in BySlice, unless it is not of torchmetrics, or contains others that synchronize their states themselves."""
    inner = [each for each in metric.modules() if hasattr(each, "sync")] if isinstance(metric, nn.Module) else []
    return BySlice(metric, name) if len(inner) == 1 and inner[0] is metric else metric  # torchmetrics overloads ==


def together(metrics: list[Any], *, name: str) -> Any:
    """Return the first of `metrics`, set up to merge the states of all, in order, when it computes.

    Raises ConfigError: `metrics.NAME` keeps its samples apart, and slices have different numbers of them.
    """
    states, turn, first = [_state(metric) for metric in metrics], count(), metrics[0]
    if len({len(state) for state in states}) > 1:
        raise ConfigError(
            f"metrics.{name} gathers sample by sample, and the slices have different numbers of them: give its lists "
            "dist_reduce_fx='cat', or leave virtual_world_size out"
        )
    first.distributed_available_fn = lambda: True
    first.dist_sync_fn = lambda _, group=None: [state[number] for number in [next(turn)] for state in states]
    return first


def _state(metric: Any) -> list[Tensor]:
    """Return the tensors that the metric would exchange with other ranks, in the same order."""
    found: list[Tensor] = []

    def note(tensor: Tensor, group: Any = None) -> list[Tensor]:
        found.append(tensor)
        return [tensor]

    metric.sync(dist_sync_fn=note, distributed_available=lambda: True)
    metric.unsync()
    return found
