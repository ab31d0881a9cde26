"""Means of what a loop reports with its steps, over all samples since the last `train` record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.code_location import described
from muster.errors import ConfigError
from muster.world.dtensor import in_pieces
from muster.world.group import World

NAME = "loop/totals"
WEIGHT = "\0weight"
"""Suffix of the sum of the weights of a value, which a name of a value cannot end with."""
MOST = 1000
"""Number of values of one name that are added up at once."""


class RunningMeans:
    """Sums over samples; values on the device are read once per log line. A resume continues the sums."""

    def __init__(self, world: World):
        self._world = world
        self._sums: dict[str, float] = {}
        self._added: dict[str, list[tuple[Any, float]]] = {}  # not yet in the sums: an operation a step costs more

    def add(self, values: Mapping[str, Any], *, weight: float) -> None:
        """Add a step's `values`, means over the samples of this rank, numbers or tensors of one element.

        Raises:
            ConfigError: a value is neither.
        """
        for name, value in values.items():
            mean = number_of(value, what=f"step({name}=...)", meaning="the mean over this rank's samples")
            self._added.setdefault(name, []).append((mean, weight))
        if any(len(added) >= MOST for added in self._added.values()):
            self._plain()

    def close(self) -> dict[str, float]:
        """Return the means over all ranks, and begin anew. Waits for the device. Collective."""
        own, self._sums = self._plain(), {}
        sums = self._world.sum_named(own)
        names = [name for name in sums if not name.endswith(WEIGHT)]
        return {name: sums[name] / sums[f"{name}{WEIGHT}"] for name in names if sums.get(f"{name}{WEIGHT}")}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Collective."""
        own = self._plain()
        return {NAME: self._world.sum_named(own), f"{own_prefix(self._world.rank)}{NAME}": own}

    def own(self) -> dict[str, float]:
        """Return this rank's sums. Waits for the device."""
        return self._plain()

    def put(self, sums: Mapping[str, float]) -> None:
        """Set this rank's sums."""
        self._sums, self._added = dict(sums), {}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return no tensors to read into: the state is plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state: this rank's own, or at another world size the sum over all ranks on rank 0."""
        own = state.get(f"{own_prefix(self._world.rank)}{NAME}")
        shared = state.get(NAME, {}) if self._world.is_first else {}
        self.put(shared if own is None else own)

    def _plain(self) -> dict[str, float]:
        """Return the sums, with what was added since the last call. Waits for the device."""
        for name, added in self._added.items():
            for mean, (_, weight) in zip(_numbers([mean for mean, _ in added]), added, strict=True):
                for key, more in ((name, mean * weight), (f"{name}{WEIGHT}", weight)):
                    self._sums[key] = self._sums.get(key, 0.0) + more
        self._added = {}
        return dict(self._sums)


def _numbers(values: list[Any]) -> list[float]:
    """Return numbers and tensors of one element as numbers; tensors on one device are read together."""
    places = {value.device if isinstance(value, Tensor) else None for value in values}
    if len(places) == 1 and None not in places:
        numbers: list[float] = torch.stack(values).tolist()
        return numbers
    return [float(value) for value in values]


def number_of(value: Any, *, what: str, meaning: str) -> Any:
    """Return a number, or a tensor of one element, in float64, in which a product with a number of samples is exact.

    what, meaning: of the value, for the message.

    Raises:
        ConfigError: `value` is neither.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        own: Tensor = value.full_tensor() if in_pieces(value) else value  # a DTensor may be a part of a sum
        return own.detach().to(torch.float64, copy=True).reshape(())  # a loop may change its own in place
    if isinstance(value, int | float):
        return float(value)
    raise ConfigError(f"{what} is {described(value)}: give a number or a tensor of one element, {meaning}")
