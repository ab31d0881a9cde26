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


class BySlice:
    """Wraps `metric`, a torchmetrics object, and keeps one copy of it for each slice."""

    def __init__(self, metric: Any):
        self.metric = metric
        self._copies: dict[int, Any] = {}

    def update(self, outputs: Any, targets: Any, *, slice: int) -> None:
        """Update the copy of this slice."""
        if slice not in self._copies:
            self._copies[slice] = copy.deepcopy(self.metric)
        self._copies[slice].update(outputs, targets)

    def compute(self) -> Any:
        """Return the value over all slices of all ranks. Collective: every rank must call it."""
        mine = {number: each.to("cpu") for number, each in self._copies.items()}
        everybodys: list[Any] = [mine]
        if dist.is_initialized():
            everybodys = [None] * dist.get_world_size()
            dist.all_gather_object(everybodys, mine)
        copies = dict(sorted(pair for of_rank in everybodys for pair in of_rank.items()))
        return together([*copies.values()]).compute()

    def reset(self) -> None:
        """Discard all copies."""
        self._copies = {}


def by_slice(metric: Any) -> Any:
    """Wrap `metric` in BySlice.

    A metric that is not of torchmetrics, or that contains others which synchronize their states themselves, is returned
    as is.
    """
    inner = [each for each in metric.modules() if hasattr(each, "sync")] if isinstance(metric, nn.Module) else []
    return BySlice(metric) if inner == [metric] else metric


def together(metrics: list[Any]) -> Any:
    """Return the first of `metrics`, set up to merge the states of all, in order, when it computes."""
    states, turn, first = [_state(metric) for metric in metrics], count(), metrics[0]
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
