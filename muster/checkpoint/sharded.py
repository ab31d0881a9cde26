"""Assignment of the pieces of sharded tensors to ranks, for writing and reading, by torch's own planners.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from muster.checkpoint.index import Index, OwnPiece, Read, WritePlan, dtype_of


class Sharded:
    """Divides a state with sharded tensors; same interface as checkpoint.state.Replicated."""

    def __init__(self, *, is_first: bool):
        self._is_first = is_first
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def local(self, state: Mapping[str, Any]) -> SavePlan:
        self._planner.set_up_planner(dict(state), is_coordinator=self._is_first)
        return self._planner.create_local_plan()

    def joint(self, plans: list[SavePlan]) -> list[WritePlan]:
        return [_plan(plan) for plan in self._planner.create_global_plan(plans)[0]]


def _plan(plan: SavePlan) -> WritePlan:
    pieces = [
        OwnPiece(
            item.index.fqn,
            tuple(item.tensor_data.size),
            item.tensor_data.properties.dtype,
            tuple(item.tensor_data.chunk.offsets),
            tuple(item.tensor_data.chunk.sizes),
        )
        for item in plan.items
        if item.tensor_data is not None
    ]
    return WritePlan(pieces, [item.index.fqn for item in plan.items if item.tensor_data is None])


def reads(index: Index, into: Mapping[str, Tensor]) -> Iterator[Read]:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(into), Metadata({name: _metadata(index["tensors"][name]) for name in into}))
    pieces = {(name, tuple(piece["offsets"])): piece for name in into for piece in index["tensors"][name]["pieces"]}
    for item in planner.create_local_plan().items:
        name = item.storage_index.fqn
        piece = pieces[name, tuple(item.storage_index.offset or ())]
        dtype = dtype_of(index["tensors"][name]["dtype"])
        yield Read(piece, dtype, tuple(item.storage_offsets), tuple(item.lengths), planner.resolve_tensor(item))


def _metadata(entry: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(entry["dtype"])),
        size=torch.Size(entry["size"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])) for piece in entry["pieces"]
        ],
    )
