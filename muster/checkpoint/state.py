"""The format of a checkpointed state: how ranks divide the writing, and how any other layout reads it.

A rank's file contains the bytes of its tensor pieces one after the other, then its plain values (plain_values.py);
`index.json` gives the location of every piece. Replicated state is divided here; a state with sharded tensors is divided
by torch's planners (sharded.py), which take a second to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.index import Index, OwnPiece, Read, WritePlan, dtype_of
from muster.checkpoint.plain_values import dumps_plain, host_copy, loads
from muster.checkpoint.trained import SavedTensor
from muster.errors import Diverged, StorageError
from muster.tensor_bytes import as_bytes
from muster.world.dtensor import in_pieces, own_piece
from muster.world.group import World

ALIGNMENT = 64
"""Bytes; a multiple of the size of every dtype."""


class Replicated:
    """Divides a state without sharded tensors. An entry is written by one of the ranks that have it."""

    def local(self, state: Mapping[str, Any]) -> WritePlan:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        pieces = [
            OwnPiece(name, tuple(each.shape), each.dtype, (0,) * each.dim(), tuple(each.shape))
            for name, each in tensors.items()
        ]
        return WritePlan(pieces, [name for name in state if name not in tensors])

    def joint(self, plans: list[WritePlan]) -> list[WritePlan]:
        """Return the pieces that each rank writes: a tensor goes to the rank with the fewest bytes so far, a value to the lowest rank."""
        owners: dict[str, list[int]] = {}
        pieces: dict[str, OwnPiece] = {}
        for rank, plan in enumerate(plans):
            pieces |= {piece.name: piece for piece in plan.pieces}
            for name in (*(piece.name for piece in plan.pieces), *plan.values):
                owners.setdefault(name, []).append(rank)
        divided, load = [WritePlan([], []) for _ in plans], [0] * len(plans)
        for name, ranks in owners.items():
            if piece := pieces.get(name):
                rank = min(ranks, key=load.__getitem__)
                divided[rank].pieces.append(piece)
                load[rank] += piece.bytes
            else:
                divided[ranks[0]].values.append(name)
        return divided


@dataclass(frozen=True)
class RankShare:
    """This rank's part of one state, in host memory.

    finite: names of the tensors that must be finite, by their places.
    ready: waits until the tensors are there; on CUDA the device copies them while training goes on.
    """

    tensors: list[Tensor]
    values: dict[str, Any]
    finite: Mapping[int, str] = field(default_factory=dict)
    ready: Callable[[], object] = lambda: None

    def pieces(self) -> Iterator[Any]:
        """Yield the content of this rank's file, as buffers, once it is there.

        Raises:
            Diverged: it is not finite.
            ConfigError: it has a value that would not be read again.
        """
        self.ready()
        for place, tensor in enumerate(self.tensors):
            if place in self.finite and not is_finite(tensor):
                raise Diverged(f"{self.finite[place]} is not finite: lower the learning rate, or clip the gradient")
            yield as_bytes(tensor)
        yield memoryview(dumps_plain(self.values))


class Shares:
    """Divides states among the ranks. Plans are exchanged only when a state's structure has changed."""

    def __init__(self, world: World):
        self._world = world
        self._structure: list[Any] | None = None
        self._plan = WritePlan([], [])
        self._copies: list[Tensor] = []
        self.index: Index = {}
        """Index of the last state divided; rank 0 only."""

    def divide(self, state: Mapping[str, Any], *, finite: Collection[str] = ()) -> RankShare:
        """Copy this rank's part of `state`; each replicated entry is written by one rank. `finite`: see RankShare. Collective.

        The next call overwrites the copies: allocating new memory takes several times as long as copying.
        """
        structure = [_structure(name, value) for name, value in state.items()]
        if self._world.sum([float(structure != self._structure)])[0]:
            self._exchange(state)
            self._structure = structure
        pieces = self._plan.pieces
        ready = self._copy([own_piece(state[piece.name]) for piece in pieces])
        values = {name: host_copy(state[name]) for name in self._plan.values}
        checked = {place: piece.name for place, piece in enumerate(pieces) if piece.name in finite}
        return RankShare(self._copies, values, checked, ready)

    def _copy(self, tensors: list[Tensor]) -> Callable[[], object]:
        """Copy tensors to host memory, and return a function that waits for the copies.

        On CUDA the memory is page-locked, and the copies are queued between this step and the next one, whose update cannot
        overtake them. Only the device and the thread that writes the file wait for them. On a stream of their own they would
        race with the next forward pass, which changes buffers, and with a user's changes to the weights.
        """
        fits = [(tensor.shape, tensor.dtype) for tensor in tensors] == [(c.shape, c.dtype) for c in self._copies]
        cuda = self._world.device.type == "cuda"
        if not fits:
            self._copies = []  # before the new memory is taken
            self._copies = _in_one_piece(tensors) if cuda else [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=cuda)
        if not cuda:
            return lambda: None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def _exchange(self, state: Mapping[str, Any]) -> None:
        world, planner = self._world, self._planner(state)
        local: Any = planner.local(state)
        plans: list[Any] = [local] * world.size
        if world.size > 1:
            dist.gather_object(local, plans if world.is_first else None)
        if world.is_first:
            plans = planner.joint(plans)
            self.index = _index(plans)
        mine = [plans[0]]
        if world.size > 1:
            dist.scatter_object_list(mine, plans if world.is_first else None)
        self._plan = mine[0]

    def _planner(self, state: Mapping[str, Any]) -> Any:
        if not self._world.sum([float(any(map(in_pieces, state.values())))])[0]:
            return Replicated()
        from muster.checkpoint.sharded import Sharded  # imported here: torch's planners take a second

        return Sharded(is_first=self._world.is_first)


def _in_one_piece(tensors: list[Tensor]) -> list[Tensor]:
    """Return memory for copies of `tensors` in one page-locked block: the system locks each block anew, and slowly."""
    sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    parts = zip(torch.split(block, sizes), tensors, strict=True)
    return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]


def _structure(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (name,)
    layout = (value.device_mesh, value.placements) if in_pieces(value) else ()
    return (name, value.shape, value.dtype, *layout)


def read(index: Index, names: Iterable[str], into: dict[str, Tensor], open_file: Any) -> dict[str, Any]:
    """Fill the tensors `into` with their parts of the saved ones, and return the plain values among `names`.

    `open_file` returns a context manager with a file's stream. Raises StorageError, and ValueError if a shape differs.
    """
    wanted: dict[str, list[Read]] = {}
    for each in _reads(index, into):
        wanted.setdefault(each.piece["file"], []).append(each)
    for file, parts in wanted.items():
        with open_file(file) as stream:
            for part in parts:
                saved = _read_part(stream, part)
                with torch.no_grad():
                    part.into.copy_(saved)
    return _read_values({name: index["values"][name] for name in names if name in index["values"]}, open_file)


def _reads(index: Index, into: dict[str, Tensor]) -> Iterator[Read]:
    if sharded := {name: target for name, target in into.items() if in_pieces(target)}:
        from muster.checkpoint.sharded import reads

        yield from reads(index, sharded)
    for name in into.keys() - sharded.keys():
        entry, target = index["tensors"][name], into[name]
        if entry["size"] != list(target.shape):
            raise ValueError(f"{name} has shape {entry['size']} in the checkpoint and {list(target.shape)} in this run")
        for piece in entry["pieces"]:
            place = target
            for dimension, (offset, size) in enumerate(zip(piece["offsets"], piece["sizes"], strict=True)):
                place = place.narrow(dimension, offset, size)
            yield Read(piece, dtype_of(entry["dtype"]), (0,) * target.dim(), tuple(piece["sizes"]), place)


def saved_tensors(index: Index, names: Iterable[str]) -> dict[str, SavedTensor]:
    tensors = index["tensors"]
    return {
        name: SavedTensor(torch.Size(tensors[name]["size"]), dtype_of(tensors[name]["dtype"]))
        for name in names
        if name in tensors
    }


def is_finite(tensor: Tensor) -> bool:
    """Return True if all elements and their norm are finite; the norm of weights above 1e19 is not, and whole numbers are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.itemsize == 1:  # floats of 8 bits have no norm
        tensor = tensor.float()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return bool(torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.itemsize == 2 else None).isfinite())


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def _index(plans: list[WritePlan]) -> Index:
    """Return the location of every entry: in each file tensors in the order of the plan, then plain values."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        at = 0
        for name, size, dtype, offsets, sizes in plan.pieces:
            entry = tensors.setdefault(
                name, {"size": list(size), "dtype": str(dtype).removeprefix("torch."), "pieces": []}
            )
            entry["pieces"].append({"offsets": list(offsets), "sizes": list(sizes), "file": file_of(rank), "at": at})
            at += math.prod(sizes) * dtype.itemsize
        values |= {name: {"file": file_of(rank), "at": at} for name in plan.values}
    return {"tensors": tensors, "values": values}


def _read_part(stream: Any, part: Read) -> Tensor:
    """Read only the needed rows of the first dimension, then narrow the other dimensions."""
    piece, sizes, offsets, lengths = part.piece, list(part.piece["sizes"]), part.offsets, part.lengths
    row = math.prod(sizes[1:]) * part.dtype.itemsize
    rows = lengths[0] if sizes else 1
    stream.seek(piece["at"] + (offsets[0] * row if sizes else 0))
    data = bytearray(stream.read(rows * row))
    if len(data) != rows * row:
        raise StorageError(f"{piece['file']} of the checkpoint is truncated: run again to verify it")
    tensor = torch.frombuffer(data, dtype=part.dtype) if data else torch.empty(0, dtype=part.dtype)
    tensor = tensor.view([rows, *sizes[1:]] if sizes else [])
    for dimension in range(1, len(sizes)):
        tensor = tensor.narrow(dimension, offsets[dimension], lengths[dimension])
    return tensor


def _read_values(where: dict[str, Any], open_file: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for file, at in sorted({(entry["file"], entry["at"]) for entry in where.values()}):
        with open_file(file) as stream:
            stream.seek(at)
            data = stream.read()
        try:
            values |= loads(data)
        except Exception as error:  # an unpickling error: the data is not a plain value
            raise StorageError(
                f"{file} of the checkpoint contains an object that is not a plain value: {error}"
            ) from error
    return {name: values[name] for name in where}
