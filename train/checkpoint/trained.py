"""The seam between checkpoints and what is trained: the runtime knows no model, only named state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from train.dist.world import World

EXTRA = "_extra_state"
"""How torch names what a module's `get_extra_state` gives."""


@dataclass(frozen=True)
class SavedTensor:
    """The whole of a tensor in a checkpoint, however many pieces it lies in."""

    size: torch.Size
    dtype: torch.dtype


class Resumable(Protocol):
    """What has a state in the checkpoints."""

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """The tensors to read the `saved` ones into, in this rank's layout; what is left out is not read. Collective."""

    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state: `targets` filled, and plain values. Collective."""


class Trained(Resumable, Protocol):
    """What is trained across `world`."""

    world: World


def own_prefix(rank: int) -> str:
    """The beginning of the names of a rank's own state."""
    return f"rank-{rank:05d}/"
