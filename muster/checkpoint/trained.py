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
"""The type of what torch.compile makes of a module; its own source takes seconds to import."""


@dataclass(frozen=True)
class SavedTensor:
    """Global size and dtype of a tensor in a checkpoint, however many pieces it is stored in."""

    size: torch.Size
    dtype: torch.dtype


class Trained(Protocol):
    """State that is trained across the ranks of `world`, and is in the checkpoints."""

    world: World

    def state(self) -> dict[str, Any]:
        """Return the flat state: this rank's tensors and plain values by name. Collective."""

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return the tensors to read the `saved` ones into, in this rank's layout; tensors left out are not read.

        Collective.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state: the filled `targets` and plain values. Collective."""


def plain(name: str) -> str:
    """Return a name of a state dict as it is without torch.compile, which puts `_orig_mod.` before what a module holds."""
    return re.sub(r"(?<![^./])_orig_mod\.", "", name)


def own_prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's own state."""
    return f"rank-{rank:05d}/"
