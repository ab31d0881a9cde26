"""The model's buffers (batch-norm statistics), of which ranks that train have different ones.

Each rank's come of its own samples. DDP begins a step's first forward with the first rank's (its `broadcast_buffers`), so
there they differ by one step; elsewhere every rank goes on with its own. A model may assign another tensor to a
buffer's name at any time, so none is kept here: they are looked up whenever they are needed.
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

from train.checkpoint.trained import SavedTensor
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.common.broadcast import broadcast

OBJECTIVE = "objective/"
Place = dict[str, Any]
"""Where a module keeps its buffers: name -> tensor, or None."""


@dataclass(frozen=True)
class Kept:
    """The tensors of one place as they were, with copies of their values."""

    place: Place
    names: dict[str, str]
    tensors: Place
    copies: dict[str, Tensor]


class Buffers:
    """What the ranks' buffers are to evaluation and to whoever loads the weights: one value for all.

    Averaged in floating point, the first rank's otherwise. The ranks' own go on undisturbed, so that it makes no difference
    to training when and whether somebody looked.

    Args:
        objective: a module whose buffers, and parameters that nobody trains, belong to a run's state as the model's do.
        group: the ranks whose buffers are one model's; None: all.
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
        """Whether all ranks have the same values between two steps."""
        self._shared: dict[str, Tensor] | None = None

    @property
    def own(self) -> dict[str, Tensor]:
        """This rank's own by each of their names, as they are now."""
        named = {name: place[key] for place, names in self._places() for key, name in names.items()}
        return {name: tensor.detach() for name, tensor in named.items() if tensor is not None}

    @property
    def names(self) -> set[str]:
        """All their names, of those that are None by now, too."""
        return {name for _, names in self._places() for name in names.values()}

    def shared(self) -> dict[str, Tensor]:
        """The common values, until `forget`. Collective. Raises ConfigError: their sizes differ between the ranks."""
        if self.agree:
            return self.own
        if self._shared is None:
            self._shared = self._common(self.own)
        return self._shared

    def forget(self) -> None:
        """The ranks' own have changed."""
        self._shared = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The model has the common values inside, and afterwards its own again. Collective."""
        kept = self.copy()
        if not self.agree:
            self.put(self.shared())
        try:
            yield
        finally:
            self.put_back(kept)

    def copy(self) -> list[Kept]:
        """This rank's own, as they are now."""
        found = []
        for place, names in self._places():
            tensors = {key: place[key] for key in names}
            copies = {key: tensor.detach().clone() for key, tensor in tensors.items() if tensor is not None}
            found.append(Kept(place, names, tensors, copies))
        return found

    def put_back(self, kept: list[Kept]) -> None:
        """Give the model the very tensors that it had, with the values that they had."""
        with torch.no_grad():
            for each in kept:
                for key in each.place.keys() - each.tensors.keys():
                    del each.place[key]
                each.place.update(each.tensors)
                for key, value in each.copies.items():
                    each.tensors[key].copy_(value)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Give the buffers these values, in place where their sizes allow it; names that the model has not are left out."""
        with torch.no_grad():
            for place, names in self._places():
                for key, name in names.items():
                    if (value := values.get(name)) is not None:
                        place[key] = _in_place(place[key], value, self._device)

    def targets(self, saved: Mapping[str, SavedTensor], *, prefix: str) -> dict[str, Tensor]:
        """New tensors for what was `saved` of them, under names that begin with `prefix`."""
        names = {f"{prefix}{name}" for _, names in self._places() for name in names.values()}
        return {
            name: torch.empty(facts.size, dtype=facts.dtype, device=self._device)
            for name, facts in saved.items()
            if name in names
        }

    def make_room(self, saved: Mapping[str, SavedTensor], *, prefix: str) -> None:
        """Give a buffer that is None until the model assigns one a tensor of the size that was `saved` of it."""
        for place, names in self._places():
            for key, name in names.items():
                if place[key] is None and (facts := saved.get(f"{prefix}{name}")):
                    place[key] = torch.empty(facts.size, dtype=facts.dtype, device=self._device)

    def _places(self) -> Iterator[tuple[Place, dict[str, str]]]:
        """Each place with the full names of what is in it; a module under two names has its buffers under both."""
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
                "the model's buffers differ in names or sizes between the ranks, so that there is no common value of them: "
                "give each its size in the constructor, or keep what depends on the samples out of buffers"
            )

    def _average(self, buffers: list[Tensor]) -> None:
        if not buffers:
            return
        # In float64, and the value itself where all ranks have the same. On one device: a model may be spread over several.
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
    """Its values, of a complex one both parts."""
    return torch.view_as_real(buffer.to(torch.complex128)) if buffer.is_complex() else buffer.double()


def from_float64(values: Tensor, like: Tensor) -> Tensor:
    """What `in_float64` made of a tensor, in the shape and type of `like`."""
    if like.is_complex():
        return torch.view_as_complex(values.reshape(*like.shape, 2)).to(like.dtype)
    return values.reshape(like.shape).to(like.dtype)


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Element by element; a nan does not differ from a nan."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _full_names(path: str, place: Place) -> dict[str, str]:
    return {key: f"{path}.{key}" if path else key for key in place}


def _in_place(tensor: Tensor | None, value: Tensor, device: torch.device) -> Tensor:
    if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
        return value.detach().to(device, copy=True)
    tensor.copy_(value)
    return tensor
