"""model.pt: the trained weights in one file that plain torch.load reads, independent of the layout in training."""

from __future__ import annotations

import itertools
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.backends.base import STEP
from muster.checkpoint.commit import Saved, Storage
from muster.checkpoint.download import local_copy
from muster.checkpoint.plain_values import host_copy
from muster.checkpoint.schemas import INDEX, Manifest
from muster.checkpoint.state import read, saved_tensors
from muster.checkpoint.trained import EXTRA
from muster.errors import ConfigError, MusterError, StorageError, one_line, storage_error
from muster.files import replace_file
from muster.redact import without
from muster.tensor_bytes import as_bytes
from muster.world.dtensor import in_pieces

ALONE = "save the weights alone, torch.save(model.state_dict(), path)"
MODEL, BESIDE = "model/", "buffers/"
Place = tuple[tuple[int, ...], tuple[int, ...]]
"""The position of a piece in its tensor: (offsets, sizes)."""


@dataclass(frozen=True)
class Evaluated:
    """The tensors that a run evaluates with at a step, in host memory.

    weights: the model's state dict, with averages in place of weights where evaluation uses them.
    beside: buffers that are in no state dict, and the state of the objective under `objective/`.
    """

    weights: dict[str, Any]
    beside: dict[str, Tensor]


def write_weights(path: Path, weights: Mapping[str, Any], *, writes: bool) -> MusterError | None:
    """Write `weights` to `path` on rank 0, which `writes`. Return the error that prevented writing, or None. Collective.

    Rank 0 receives sharded tensors one piece at a time and keeps them in a file: no rank holds a whole one in memory.
    """
    spill = path.with_name(f".{path.name}.sharded")
    failure: MusterError | None = None
    whole: dict[str, Any] = {}
    places = _places(weights)
    for name, value in weights.items():
        in_memory = not in_pieces(value) and not callable(value)  # a module's extra state is not a tensor
        pieces = iter(()) if in_memory else _pieces(value, places.get(name, []), writes=writes)
        try:
            if writes and not failure:
                whole[name] = host_copy(value) if in_memory else _spilled(spill, pieces)
        except (OSError, RuntimeError) as error:
            failure = storage_error("write", error if isinstance(error, OSError) else OSError(str(error)), spill)
        for _ in pieces:  # the senders do not know that it failed
            pass
    if writes and not failure:
        try:
            replace_file(path, lambda draft: _save(whole, draft))
        except MusterError as error:
            failure = error
    return failure


def _save(whole: dict[str, Any], draft: Path) -> None:
    """Save through a stream: torch writes the name of a path into the file, and equal weights must give equal files."""
    with draft.open("wb") as file:
        torch.save(whole, file)


def _places(weights: Mapping[str, Any]) -> dict[str, list[Place | None]]:
    """Return the ranks' places in each sharded tensor; None for no piece, or for the same piece as an earlier rank. Collective."""
    sharded = {name: value for name, value in weights.items() if in_pieces(value)}
    if not sharded:
        return {}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    own = {
        name: compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)[::-1]
        for name, value in sharded.items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    places = {name: [rank[name] for rank in ranks] for name in own}
    return {
        name: [
            place if math.prod(place[1]) and place not in theirs[:rank] else None for rank, place in enumerate(theirs)
        ]
        for name, theirs in places.items()
    }


def _pieces(
    value: Any, places: Sequence[Place | None], *, writes: bool
) -> Iterator[tuple[Sequence[int], torch.Size, Tensor]]:
    """Yield (offsets, size of the whole, piece) of each piece, in host memory, on the rank that `writes`.

    Collective: every rank must exhaust it.
    """
    if not in_pieces(value):
        whole = value()
        if writes:
            yield [0] * whole.dim(), whole.shape, whole.detach().cpu()
        return
    own = value.to_local().detach()
    if writes and not value.numel():
        yield [0] * value.dim(), value.shape, own.cpu()
    for rank, place in enumerate(places):
        if place and rank == dist.get_rank():
            if writes:
                yield place[0], value.shape, own.cpu()
            else:
                dist.send(own.cpu().contiguous(), 0)
        elif place and writes:
            piece = torch.empty(place[1], dtype=own.dtype)
            dist.recv(piece, rank)
            yield place[0], value.shape, piece


def _spilled(path: Path, pieces: Iterator[tuple[Sequence[int], torch.Size, Tensor]]) -> Tensor:
    """Return the tensor of these pieces, backed by an unlinked, memory-mapped file rather than memory."""
    try:
        with path.open("wb") as file:
            for offsets, size, piece in pieces:
                dtype, shape = piece.dtype, size
                for at, run in _runs(offsets, size, piece):
                    file.seek(at * piece.element_size())
                    file.write(as_bytes(run))
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    finally:
        path.unlink(missing_ok=True)
    return mapped.view(dtype).view(shape)


def _runs(offsets: Sequence[int], size: Sequence[int], piece: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the contiguous runs of a piece in the whole tensor, each with its offset there in elements."""
    strides = [math.prod(size[dimension + 1 :]) for dimension in range(len(size))]
    cut = max((dimension for dimension in range(len(size)) if piece.shape[dimension] != size[dimension]), default=0)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in itertools.product(*map(range, piece.shape[:cut])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), piece[index]


def read_weights(source: str) -> dict[str, Any]:
    """Read a model's state dict into host memory, from `model.pt` or a checkpoint.

    `source`: a file written by torch.save, its URL, a run's folder (its `model.pt`, else its newest checkpoint), or a
    checkpoint's folder. A checkpoint gives the weights that `model.pt` would hold at its step.

    Raises ConfigError: there are none. Raises StorageError: they cannot be read.
    """
    path = local_copy(source) if "://" in source else Path(source)
    if path.is_dir() and not (path / "model.pt").exists():
        return read_evaluated(_saved_in(path)).weights
    file = path / "model.pt" if path.is_dir() else path
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError:
        raise ConfigError(f"{source} does not exist: give a file of weights, a URL, or a run's folder") from None
    except Exception as error:
        raise StorageError(f"cannot read weights from {source}: {unreadable(error)[:300]}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{source} contains a {type(found).__name__}, not a state dict: {ALONE}")
    for inner in ("state_dict", "model"):  # common names in other checkpoints
        found = found[inner] if isinstance(found.get(inner), Mapping) else found
    named = {str(name).removeprefix("module."): value for name, value in found.items()}
    weights = {name: value for name, value in named.items() if isinstance(value, Tensor) or name.endswith(EXTRA)}
    if not any(isinstance(value, Tensor) for value in weights.values()):
        raise ConfigError(f"{source} contains no named tensor: {ALONE}")
    return weights


def read_evaluated(saved: Saved, *, module: str = "model") -> Evaluated:
    """Read the tensors that the run evaluated with at this checkpoint; verify each file. Raises StorageError.

    module: the name that a job tracks the module by; the trainer's only module is `model`.
    """
    try:
        return _evaluated(saved, f"{module}/")
    except MusterError:
        raise
    except Exception as error:
        reason = without(unreadable(error), saved.storage.backend.root)[:300]
        raise StorageError(f"cannot read weights from {saved.path}: {reason}") from error


def lists_beside(saved: Saved, names: Iterable[str]) -> bool:
    """Return True if the checkpoint has any of `names`, which are in no state dict. Raises StorageError."""
    tensors = saved.index()["tensors"]
    return any(f"{BESIDE}{name}" in tensors for name in names)


def unreadable(error: Exception) -> str:
    """Return in one line why torch cannot read a file, and how to fix it. torch's own message suggests to run the code in the file."""
    text = one_line(error)
    if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in text:
        return text
    if match := re.search(r"GLOBAL (\S+)", text) or re.search(
        r"Unsupported (?:global|class)\W+([A-Za-z_][\w.]+)", text
    ):
        return f"it contains {match[1]}, which is not a tensor and could run code when loaded: {ALONE}"
    return f"it is not a file of weights: {ALONE}"


def _saved_in(path: Path) -> Saved:
    """Return the checkpoint in `path`, or the newest of the run in it. Raises ConfigError if there is none."""
    inside = path / "checkpoints"
    if match := STEP.fullmatch(path.name):
        storage, steps = Storage(str(path.parent)), [int(match[1])]
    else:
        storage = Storage(str(inside if inside.is_dir() else path))
        steps = storage.steps()
    if not steps:
        raise ConfigError(f"{path} has neither model.pt nor a checkpoint: give the folder of a run that has one")
    return Saved(storage, storage.manifest(steps[0]))


def modules_of(saved: Saved) -> list[str]:
    """Return the names of the modules in a checkpoint, sorted. Raises StorageError."""
    index = saved.index()
    roots = {name.partition("/")[0] for name in index["tensors"]}
    tracked = saved.manifest.get("tracked", ["model"])  # only a job says it
    return [name for name in sorted(tracked) if name in roots and f"{name}/groups" not in index["values"]]


def _evaluated(saved: Saved, module: str) -> Evaluated:
    index = saved.index()
    averages = Manifest.model_validate(saved.manifest).averages if module == MODEL else []
    wanted = (module, BESIDE, *averages)
    names = [name for name in (*index["tensors"], *index["values"]) if name.startswith(wanted)]
    tensors = {name: index["tensors"][name] for name in names if name in index["tensors"]}
    files = {piece["file"] for entry in tensors.values() for piece in entry["pieces"]}
    for file in files | {index["values"][name]["file"] for name in names if name in index["values"]} | {INDEX}:
        saved.compare(file)
    into = {name: torch.empty(facts.size, dtype=facts.dtype) for name, facts in saved_tensors(index, names).items()}
    values = into | read(index, names, into, saved.open)
    weights = _under(module, values)
    for prefix in averages:
        average = {name: value for name, value in _under(prefix, values).items() if name in weights}
        weights = {**{name: value for name, value in weights.items() if name not in average}, **average}
    return Evaluated(weights, _under(BESIDE, values))


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
