"""Means of what a loop reports with its steps, over all samples since the last `train` record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.dist.pieces import in_pieces
from muster.dist.world import World
from muster.errors import ConfigError
from muster.origin import described

NAME = "loop/totals"
WEIGHT = "\0weight"
"""Suffix of the sum of the weights of a value, which a name of a value cannot end with."""
OF_RECORDS = ("kind", "step", "epoch", "samples", "samples_per_s", "time")
"""Names that records have for other entries."""


class Totals:
    """Sums over samples, accumulated on the device and read once per log line; a resume continues them."""

    def __init__(self, world: World):
        self._world = world
        self._sums: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], *, weight: float) -> None:
        """Add a step's `values`, means over the samples of this rank, numbers or tensors of one element.

        Raises:
            ConfigError: a value is neither.
        """
        for name, value in values.items():
            mean = number_of(value, what=f"step({name}=...)", meaning="the mean over this rank's samples")
            for key, more in ((name, mean * weight), (f"{name}{WEIGHT}", weight)):
                self._sums[key] = self._sums[key] + more if key in self._sums else more

    def close(self) -> dict[str, float]:
        """Return the means over all ranks, and begin anew. Waits for the device. Collective: every rank must call it."""
        own, self._sums = self._plain(), {}
        sums = self._world.sum_named(own)
        names = [name for name in sums if not name.endswith(WEIGHT)]
        return {name: sums[name] / sums[f"{name}{WEIGHT}"] for name in names if sums.get(f"{name}{WEIGHT}")}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Collective: every rank must call it."""
        own = self._plain()
        return {NAME: self._world.sum_named(own), f"{own_prefix(self._world.rank)}{NAME}": own}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return no tensors to read into: the state is plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state: this rank's own, or at another world size the sum over all ranks on rank 0."""
        own = state.get(f"{own_prefix(self._world.rank)}{NAME}")
        shared = state.get(NAME, {}) if self._world.is_first else {}
        self._sums = dict(shared if own is None else own)

    def _plain(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._sums.items()}


def check_names(names: Iterable[str], what: str) -> None:
    """Raise ConfigError for a name that records use themselves."""
    for name in names:
        if name in OF_RECORDS:
            raise ConfigError(f"{what} has the name {name}, which records use themselves: choose another")


def number_of(value: Any, *, what: str, meaning: str) -> Any:
    """Return a number, or a tensor of one element, in float64, in which a product with a number of samples is exact.

    what, meaning: of the value, for the message.

    Raises:
        ConfigError: `value` is neither.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        own: Tensor = value.full_tensor() if in_pieces(value) else value  # a DTensor may be a part of a sum
        return own.detach().double().reshape(())
    if isinstance(value, int | float):
        return float(value)
    raise ConfigError(f"{what} is {described(value)}: give a number or a tensor of one element, {meaning}")
