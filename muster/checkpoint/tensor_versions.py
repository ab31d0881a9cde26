"""Detect changes of parameters and optimizer state, cheaply: by the address and version of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.world.dtensor import own_piece

SAMPLED_STEPS = 4
"""In these first steps one value of each parameter is compared, too: torch does not count changes of `.data`. One step is too few: a
momentum teacher, which begins as a copy, does not change in the first.
"""
Place = tuple[int, int]


class Changes:
    """Tells what has changed since the last look: parameters by name, or the tensors in the state of `optimizers`.

    looks: the most looks in a step.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], optimizers: Collection[Optimizer] = (), *, looks: int = 1):
        self._named, self._optimizers = [*named], optimizers
        self._places, self._values = list[Place](), list[str]()
        self._left = SAMPLED_STEPS * looks

    def look(self) -> None:
        self._places, self._values = self._places_now(), self._values_now() if self._left else []
        self._left = max(0, self._left - 1)

    def changed(self) -> str:
        """Return what has changed since the last look; empty if nothing has."""
        if (now := self._places_now()) == self._places:
            return ""
        pairs = zip(self._named, self._places, now, strict=False)
        return next((name for (name, _), one, other in pairs if one != other), "the optimizer's state")

    def changed_unseen(self) -> str:
        """Return the first parameter that was changed by `.data`, in one of the first steps."""
        if not self._values:
            return ""
        pairs = zip(self._named, self._values, self._values_now(), strict=True)
        return next((name for (name, _), one, other in pairs if one != other), "")

    def _places_now(self) -> list[Place]:
        tensors = [each for _, each in self._named]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                _add(state, tensors)
        return [*map(place, tensors)]

    def _values_now(self) -> list[str]:
        return [first_value(each) for _, each in self._named]


def _add(state: Any, tensors: list[Tensor]) -> None:
    if isinstance(state, Tensor):
        tensors.append(state)
    elif isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            _add(each, tensors)


def first_value(tensor: Tensor) -> str:
    """Return the first value as a text, as NaN is not NaN. It is read alone: to flatten an expanded tensor would make all of it."""
    own = own_piece(tensor.detach())
    return str(own[(0,) * own.dim()].item()) if own.numel() and own.layout == torch.strided else ""


def place(tensor: Any) -> Place:
    """Return the address and version of a tensor, which change with each of its changes but for one by `.data`.

    A tensor made in inference mode has no version.
    """
    return stored(tensor).data_ptr(), 0 if tensor.is_inference() else tensor._version


def stored(tensor: Tensor) -> Tensor:
    """Return the tensor, or the values of a sparse one, which itself has no storage."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
