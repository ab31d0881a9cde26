"""The index of a checkpoint, and the plans made of it: the tensor pieces that a rank writes, and those that it reads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.errors import StorageError

Index = dict[str, Any]
"""{"tensors": name -> {size, dtype, pieces: [{offsets, sizes, file, at}]}, "values": name -> {file, at}}.

at: offset in bytes.
"""


class OwnPiece(NamedTuple):
    """One rank's piece of a tensor of `size`: the block of shape `sizes` that begins at `offsets`."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class WritePlan(NamedTuple):
    """The tensor pieces that one rank writes, and the names of its plain values."""

    pieces: list[OwnPiece]
    values: list[str]


class Read(NamedTuple):
    """A read of the block of shape `lengths` at `offsets` of a saved `piece` (see Index) `into` a tensor so shaped."""

    piece: dict[str, Any]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: Tensor


def dtype_of(name: str) -> torch.dtype:
    """Return the torch.dtype of this name, without `torch.`. Raises StorageError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StorageError(f"the index of the checkpoint names {name}, which is not a tensor dtype")
    return dtype
