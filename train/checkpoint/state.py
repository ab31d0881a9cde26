"""Who writes what of a state whose tensors may be sharded, and how any other layout reads it.

The planner of torch.distributed.checkpoint decides; the files are ours. A rank's file holds the bytes of its pieces of
tensors one after the other, then its plain values as torch.save writes them; `index.json` says which piece lies where.
Nothing but plain values is ever unpickled, and those with `weights_only=True`.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

from train.dist.world import World
from train.errors import StorageError
from train.strategies.base import SavedTensor

INDEX = "index.json"
Index = dict[str, Any]
"""{"tensors": name -> {size, dtype, pieces: [{offsets, sizes, file, at}]}, "values": name -> {file, at}}; `at` in bytes."""


@dataclass(frozen=True)
class Share:
    """What this rank writes of one state, in host memory."""

    tensors: list[Tensor]
    values: dict[str, Any]

    def pieces(self) -> Iterator[Any]:
        """The bytes of its file."""
        for tensor in self.tensors:
            yield as_bytes(tensor)
        blob = io.BytesIO()
        torch.save(self.values, blob)
        yield blob.getbuffer()


class Shares:
    """Divides states among the ranks. Plans are exchanged when a state's structure has changed, and kept until then."""

    def __init__(self, world: World):
        self._world = world
        self._structure: list[Any] | None = None
        self._plan = SavePlan([])
        self._copies: list[Tensor] = []
        self.index: Index = {}
        """Of the state last divided; on rank 0."""

    def divide(self, state: Mapping[str, Any]) -> Share:
        """What this rank has to write of `state`, copied: replicated parts are written by one rank each. Collective.

        The copies stay, and the next call writes over them: fresh memory takes several times as long as the copying.
        """
        structure = [_structure(name, value) for name, value in state.items()]
        if self._world.sum([float(structure != self._structure)])[0]:
            self._exchange(state)
            self._structure = structure
        tensors = [item for item in self._plan.items if item.type is not WriteItemType.BYTE_IO]
        values = [item.index.fqn for item in self._plan.items if item.type is WriteItemType.BYTE_IO]
        self._copy([_local(state[item.index.fqn]) for item in tensors])
        return Share(self._copies, {name: host_copy(state[name]) for name in values})

    def _copy(self, tensors: list[Tensor]) -> None:
        """Into host memory, on CUDA page-locked, so that all of it travels at once."""
        fits = [(tensor.shape, tensor.dtype) for tensor in tensors] == [(c.shape, c.dtype) for c in self._copies]
        cuda = self._world.device.type == "cuda"
        if not fits:
            self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize(self._world.device)

    def _exchange(self, state: Mapping[str, Any]) -> None:
        world = self._world
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), is_coordinator=world.is_first)
        local = planner.create_local_plan()
        plans: list[Any] = [local] * world.size
        if world.size > 1:
            dist.gather_object(local, plans if world.is_first else None)
        if world.is_first:
            plans, _ = planner.create_global_plan(plans)
            self.index = _index(plans)
        mine = [plans[0]]
        if world.size > 1:
            dist.scatter_object_list(mine, plans if world.is_first else None)
        self._plan = planner.finish_plan(mine[0])


def _structure(name: str, value: Any) -> tuple[Any, ...]:
    """All of an entry that decides who writes what of it."""
    if not isinstance(value, Tensor):
        return (name,)
    layout = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
    return (name, value.shape, value.dtype, *layout)


def _local(value: Tensor) -> Tensor:
    """What this rank has of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def read(index: Index, names: Iterable[str], into: dict[str, Tensor], open_file: Any) -> dict[str, Any]:
    """Fill the tensors `into` with their parts of the saved ones, and give the plain values among `names`.

    `open_file` gives the stream of a file as a context. Raises StorageError.
    """
    wanted: dict[str, list[ReadItem]] = {}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, Metadata({name: _metadata(index["tensors"][name]) for name in into}))
    pieces = {(name, tuple(piece["offsets"])): piece for name in into for piece in index["tensors"][name]["pieces"]}
    for item in planner.create_local_plan().items:
        piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        wanted.setdefault(piece["file"], []).append(item)
    for file, items in wanted.items():
        with open_file(file) as stream:
            for item in items:
                piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                saved = _read_piece(stream, piece, item, _dtype(index["tensors"][item.storage_index.fqn]["dtype"]))
                with torch.no_grad():
                    planner.resolve_tensor(item).copy_(saved)
    return _read_values({name: index["values"][name] for name in names if name in index["values"]}, open_file)


def saved_tensors(index: Index, names: Iterable[str]) -> dict[str, SavedTensor]:
    """Size and type of the tensors among `names`."""
    tensors = index["tensors"]
    return {
        name: SavedTensor(torch.Size(tensors[name]["size"]), _dtype(tensors[name]["dtype"]))
        for name in names
        if name in tensors
    }


def host_copy(value: Any) -> Any:
    """A deep copy in host memory, so that training may continue while it is written."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(item) for key, item in value.items()}
    return type(value)(host_copy(item) for item in value) if isinstance(value, (list, tuple)) else value


def as_bytes(tensor: Tensor) -> Any:
    """The elements of a tensor in host memory, in the order of its dimensions, as a buffer."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else b""


def file_of(rank: int) -> str:
    """The name of the file with what `rank` wrote."""
    return f"rank-{rank:05d}.bin"


def _index(plans: list[SavePlan]) -> Index:
    """Where everything will lie: tensors in the order of the plan, then plain values."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        at = 0
        for item in plan.items:
            if item.tensor_data is None:
                continue
            size, dtype = list(item.tensor_data.size), item.tensor_data.properties.dtype
            entry = tensors.setdefault(
                item.index.fqn, {"size": size, "dtype": str(dtype).removeprefix("torch."), "pieces": []}
            )
            chunk = item.tensor_data.chunk
            piece = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file_of(rank), "at": at}
            entry["pieces"].append(piece)
            at += math.prod(chunk.sizes) * dtype.itemsize
        values |= {item.index.fqn: {"file": file_of(rank), "at": at} for item in plan.items if item.tensor_data is None}
    return {"tensors": tensors, "values": values}


def _metadata(entry: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(entry["dtype"])),
        size=torch.Size(entry["size"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])) for piece in entry["pieces"]
        ],
    )


def _read_piece(stream: Any, piece: dict[str, Any], item: ReadItem, dtype: torch.dtype) -> Tensor:
    """The part of a saved piece that `item` names; of its first dimension no more is read than that."""
    sizes, offsets, lengths = list(piece["sizes"]), list(item.storage_offsets), list(item.lengths)
    row = math.prod(sizes[1:]) * dtype.itemsize
    rows = lengths[0] if sizes else 1
    stream.seek(piece["at"] + (offsets[0] * row if sizes else 0))
    data = bytearray(stream.read(rows * row))
    if len(data) != rows * row:
        raise StorageError(f"{piece['file']} of the checkpoint ends early: run again to have it verified")
    tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = tensor.view([rows, *sizes[1:]] if sizes else [])
    for dimension in range(1, len(sizes)):
        tensor = tensor.narrow(dimension, offsets[dimension], lengths[dimension])
    return tensor


def _read_values(where: dict[str, Any], open_file: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for file, at in sorted({(entry["file"], entry["at"]) for entry in where.values()}):
        with open_file(file) as stream:
            stream.seek(at)
            blob = io.BytesIO(stream.read())
        try:
            values |= torch.load(blob, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle's own, which is no plain value
            raise StorageError(f"{file} of the checkpoint holds what is no plain value: {error}") from error
    return {name: values[name] for name in where}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StorageError(f"the index of the checkpoint names {name}, which is no type of a tensor")
    return dtype
