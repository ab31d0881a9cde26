"""The model's buffers, such as batch-norm statistics, which differ between ranks during training.

Each rank's buffers depend on its own samples. DDP broadcasts the first rank's buffers before a step's first forward
(`broadcast_buffers`), so there they differ by one step; elsewhere each rank continues with its own. A model may assign
a new tensor to a buffer's name at any time, so buffers are looked up on each use and never cached.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.checkpoint.trained import SavedTensor
from muster.errors import ConfigError
from muster.train.strategies.replicas.broadcast import broadcast
from muster.world.group import World

OBJECTIVE = "objective/"
Place = dict[str, Any]
"""The dict in which a module stores its buffers: name -> tensor, or None."""


@dataclass(frozen=True)
class Kept:
    """A snapshot of one place: its tensors, and copies of their values."""

    place: Place
    names: dict[str, str]
    tensors: Place
    copies: dict[str, Tensor]


class Buffers:
    """Common values of the ranks' buffers, for evaluation and for saved weights.

    Floating-point buffers are averaged over the ranks; of others the first rank's value is used. The ranks' own buffers
    do not change, so evaluating or saving does not affect training.

    objective: a module whose buffers and (untrained) parameters are part of the run's state, too.
    group: process group of the ranks that share the model's buffers; None: all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        objective: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self._model, self._objective = model, objective
        self._size = dist.get_world_size(group) if group else world.size
        self._group, self._device = group, world.device
        self.agree = self._size == 1
        """True if all ranks have the same values between two steps."""
        self._shared: dict[str, Tensor] | None = None
        self._dicts: list[Place] | None = None

    @property
    def own(self) -> dict[str, Tensor]:
        """This rank's current buffers, by each of their names."""
        named = {name: place[key] for place, names in self._places() for key, name in names.items()}
        return {name: tensor.detach() for name, tensor in named.items() if tensor is not None}

    def none_here(self) -> bool:
        """Return True if there is no buffer now; much cheaper than `own`. Modules that join the model later are not seen."""
        if self._dicts is None:
            self._dicts = [module._buffers for module in self._model.modules()]
        return self._objective is None and not any(self._dicts)

    @property
    def names(self) -> set[str]:
        """Names of all buffers, including those that are currently None."""
        return {name for _, names in self._places() for name in names.values()}

    def shared(self) -> dict[str, Tensor]:
        """The common values, cached until `forget`. Collective. Raises ConfigError if names or sizes differ by rank."""
        if self.agree:
            return self.own
        if self._shared is None:
            self._shared = self._common(self.own)
        return self._shared

    def forget(self) -> None:
        """Drop the cached common values, because the ranks' own buffers have changed."""
        self._shared = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: the model holds the common values inside, its own buffers again afterwards. Collective."""
        kept = self.copy()
        if not self.agree:
            self.put(self.shared())
        try:
            yield
        finally:
            self.put_back(kept)

    def copy(self) -> list[Kept]:
        found = []
        for place, names in self._places():
            tensors = {key: place[key] for key in names}
            copies = {key: tensor.detach().clone() for key, tensor in tensors.items() if tensor is not None}
            found.append(Kept(place, names, tensors, copies))
        return found

    def put_back(self, kept: list[Kept]) -> None:
        """Restore a snapshot: the same tensor objects, with the values that they had."""
        with torch.no_grad():
            for each in kept:
                for key in each.place.keys() - each.tensors.keys():
                    del each.place[key]
                each.place.update(each.tensors)
                for key, value in each.copies.items():
                    each.tensors[key].copy_(value)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to `values`, in place if shape and dtype match; names that the model lacks are ignored."""
        with torch.no_grad():
            for place, names in self._places():
                for key, name in names.items():
                    if (value := values.get(name)) is not None:
                        place[key] = _in_place(place[key], value, self._device)

    def targets(self, saved: Mapping[str, SavedTensor], *, prefix: str) -> dict[str, Tensor]:
        """New tensors to read the `saved` buffers into, for names that begin with `prefix`."""
        names = {f"{prefix}{name}" for _, names in self._places() for name in names.values()}
        return {
            name: torch.empty(facts.size, dtype=facts.dtype, device=self._device)
            for name, facts in saved.items()
            if name in names
        }

    def make_room(self, saved: Mapping[str, SavedTensor], *, prefix: str) -> None:
        """Replace each buffer that is None by an empty tensor of its `saved` size."""
        for place, names in self._places():
            for key, name in names.items():
                if place[key] is None and (facts := saved.get(f"{prefix}{name}")):
                    place[key] = torch.empty(facts.size, dtype=facts.dtype, device=self._device)

    def _places(self) -> Iterator[tuple[Place, dict[str, str]]]:
        """Yield each place and the full names of its entries; a module with two names is yielded under both."""
        for path, module in self._model.named_modules(remove_duplicate=False):
            if module._buffers:
                yield module._buffers, _full_names(path, module._buffers)
        if self._objective is not None:
            for path, module in self._objective.named_modules(remove_duplicate=False):
                for place in (module._buffers, module._parameters):
                    if place:
                        yield place, {key: f"{OBJECTIVE}{name}" for key, name in _full_names(path, place).items()}

    def _common(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        if not own:
            return {}
        self._see_sizes(own)
        shared = {name: buffer.clone() for name, buffer in own.items()}
        self._average([buffer for buffer in shared.values() if is_averaged(buffer)])
        whole = [buffer for buffer in shared.values() if not is_averaged(buffer)]
        broadcast(whole, group=self._group, by=self._device)
        return shared

    def _see_sizes(self, own: dict[str, Tensor]) -> None:
        facts = repr([(name, tuple(buffer.shape), buffer.dtype) for name, buffer in own.items()])
        digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7])
        both = torch.tensor([digest, -digest], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        if int(both[0]) != -int(both[1]):
            raise ConfigError(
                "the model's buffers differ in names or sizes between the ranks, so they have no common value: "
                "give each its size in the constructor, or keep what depends on the samples out of buffers"
            )

    def _average(self, buffers: list[Tensor]) -> None:
        if not buffers:
            return
        # In float64; a value that is the same on all ranks is kept exactly. On one device: a model may be on several.
        parts = [in_float64(buffer).flatten().to(self._device) for buffer in buffers]
        mine = torch.cat(parts)
        first = mine.clone()
        dist.broadcast(first, group=self._group, group_src=0)
        both = torch.stack([mine, differs(mine, first).double()])
        dist.all_reduce(both, group=self._group)
        common = torch.where(both[1] > 0, both[0] / self._size, first)
        for buffer, part in zip(buffers, torch.split(common, [part.numel() for part in parts]), strict=True):
            buffer.copy_(from_float64(part, buffer))


def is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def in_float64(buffer: Tensor) -> Tensor:
    """Return the values in float64; a complex tensor gets a last dimension of 2 for its parts."""
    return torch.view_as_real(buffer.to(torch.complex128)) if buffer.is_complex() else buffer.double()


def from_float64(values: Tensor, like: Tensor) -> Tensor:
    """Undo `in_float64`: return `values` in the shape and dtype of `like`."""
    if like.is_complex():
        return torch.view_as_complex(values.reshape(*like.shape, 2)).to(like.dtype)
    return values.reshape(like.shape).to(like.dtype)


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Element-wise inequality in which NaN equals NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _full_names(path: str, place: Place) -> dict[str, str]:
    return {key: f"{path}.{key}" if path else key for key in place}


def _in_place(tensor: Tensor | None, value: Tensor, device: torch.device) -> Tensor:
    if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
        return value.detach().to(device, copy=True)
    tensor.copy_(value)
    return tensor
