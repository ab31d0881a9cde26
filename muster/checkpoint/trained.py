"""Interface between checkpoints and the trained state: the runtime knows no model, only named state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from muster.world.group import World

EXTRA = "_extra_state"
"""Suffix of the state-dict entry for a module's `get_extra_state`."""
COMPILED = "OptimizedModule"
"""Name of the module type that torch.compile creates; importing the type takes seconds."""


@dataclass(frozen=True)
class SavedTensor:
    """Global size and dtype of a tensor in a checkpoint, however many pieces it is stored in."""

    size: torch.Size
    dtype: torch.dtype


class Trained(Protocol):
    """State that is trained across the ranks of `world` and saved in checkpoints."""

    world: World

    def state(self) -> dict[str, Any]:
        """Return the flat state: this rank's tensors and plain values by name. Collective."""

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return tensors in this rank's layout to read the `saved` ones into; tensors left out are not read. Collective."""

    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state: the filled `targets` and plain values. Collective."""


def plain(name: str) -> str:
    """Return a state-dict name without the `_orig_mod.` that torch.compile inserts."""
    return re.sub(r"(?<![^./])_orig_mod\.", "", name)


def extra_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state (`get_extra_state`) in a model's state dict, by the names there."""
    return {name: value for name, value in weights.items() if name.rpartition(".")[2] == EXTRA}


def own_prefix(rank: int) -> str:
    return f"rank-{rank:05d}/"
