"""A torchmetrics metric under `virtual_world_size`: its state is kept by slice, and added up in the slices' order.

Sums of floats round with the number of ranks that hold their parts. Here each slice has a copy of the metric, and
torchmetrics puts the copies together as it does those of ranks.
"""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class BySlice:
    """`update`, `compute` and `reset` of `metric`, an object of torchmetrics."""

    def __init__(self, metric: Any):
        self.metric = metric
        self._copies: dict[int, Any] = {}

    def update(self, outputs: Any, targets: Any, *, slice: int) -> None:
        if slice not in self._copies:
            self._copies[slice] = copy.deepcopy(self.metric)
        self._copies[slice].update(outputs, targets)

    def compute(self) -> Any:
        """The value of all slices of all ranks. Collective."""
        mine = {number: each.to("cpu") for number, each in self._copies.items()}
        everybodys: list[Any] = [mine]
        if dist.is_initialized():
            everybodys = [None] * dist.get_world_size()
            dist.all_gather_object(everybodys, mine)
        copies = dict(sorted(pair for of_rank in everybodys for pair in of_rank.items()))
        return together([*copies.values()]).compute()

    def reset(self) -> None:
        self._copies = {}


def by_slice(metric: Any) -> Any:
    """`metric` by slice; itself where it is none of torchmetrics, or made of others that add up their states themselves."""
    inner = [each for each in metric.modules() if hasattr(each, "sync")] if isinstance(metric, nn.Module) else []
    return BySlice(metric) if inner == [metric] else metric


def together(metrics: list[Any]) -> Any:
    """The first of `metrics`, which has then seen what all of them have, in their order."""
    states, turn, first = [_state(metric) for metric in metrics], count(), metrics[0]
    first.distributed_available_fn = lambda: True
    first.dist_sync_fn = lambda _, group=None: [state[number] for number in [next(turn)] for state in states]
    return first


def _state(metric: Any) -> list[Tensor]:
    """The tensors that it would exchange with other ranks, in the order in which it does."""
    found: list[Tensor] = []

    def note(tensor: Tensor, group: Any = None) -> list[Tensor]:
        found.append(tensor)
        return [tensor]

    metric.sync(dist_sync_fn=note, distributed_available=lambda: True)
    metric.unsync()
    return found
