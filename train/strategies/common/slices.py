"""An optimizer step whose gradient is that of `virtual_world_size` ranks, whatever the number of true ones.

Each slice of the global batch starts from the same parameters, buffers and random numbers wherever it is worked
through; what it gives (gradient, buffers, its share of the loss) is added up by one tree over the slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from train.data.generators import seed_generators
from train.data.loader import Batch
from train.dist.reduction import TreeSum
from train.plan import leaves_of
from train.strategies.base import Recipe
from train.strategies.common.broadcast import broadcast
from train.strategies.common.optimizer_step import OptimizerStep


class SlicedStep(OptimizerStep):
    """An OptimizerStep on a plain replica. Every rank ends a step with the same bits.

    What is summed is flat, one vector for each type: gradients, buffers, how many slices gave a parameter a gradient,
    the loss, and how many slices had samples.
    """

    def __init__(self, recipe: Recipe, *, slices: int, **parts: Any):
        super().__init__(recipe, **parts)
        self.slices = slices
        self._floating = [name for name, buffer in self.buffers.own.items() if buffer.is_floating_point()]
        self._whole = [name for name in self.buffers.own if name not in self._floating]
        if self.world.size > 1:
            broadcast((*self.model.parameters(), *self.model.buffers()))

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        """Leave the global batch's gradient in the parameters; its loss on rank 0, and zero elsewhere, []. Collective."""
        world, start = self.world, self.buffers.copy()
        by_slice = {number: list(micro) for number, micro in groupby(batches, key=lambda batch: batch.slice)}
        trees: list[TreeSum] = []
        ends: dict[str, Tensor] = start
        for number in leaves_of(world.rank, world.size, self.slices):
            self.buffers.put_back(start)
            flat = self._slice(step, number, by_slice.get(number, []))
            if number in by_slice:
                ends = {name: self.buffers.own[name].clone() for name in self._whole}
            trees = trees or [
                TreeSum(self.slices, rank=world.rank, world_size=world.size, memory=world.memory) for _ in flat
            ]
            for tree, vector in zip(trees, flat, strict=True):
                tree.add(number, vector)
        return self._take([tree.total() for tree in trees], ends)

    def _slice(self, step: int, number: int, batches: list[Batch]) -> list[Tensor]:
        """Everything that is summed, of one slice."""
        _seed(self.recipe.seed, step, number)
        shares = [self._share(batch, last=batch is batches[-1]) for batch in batches]
        loss = torch.stack(shares).sum() if shares else torch.zeros((), device=self.world.device)
        gradients = [p.grad for p in self.parameters]
        used = [float(gradient is not None) for gradient in gradients]
        count = torch.tensor([*used, float(bool(batches))], device=self.world.device)
        values = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        buffers = [self.buffers.own[name] * bool(batches) for name in self._floating]
        for parameter in self.parameters:
            parameter.grad = None
        return list(_pack([*values, *buffers, count, loss.float().reshape(1)], multiple=self.world.size).values())

    def _take(self, totals: list[Tensor], ends: dict[str, Tensor]) -> Tensor:
        """Give everybody the sums."""
        device = self.world.device
        likes = [*self.parameters, *(self.buffers.own[name] for name in self._floating)]
        more = [torch.empty(len(self.parameters) + 1, device=device), torch.empty(1, device=device)]
        *summed, count, loss = _unpack(totals, [*likes, *more])
        for parameter, gradient, given in zip(self.parameters, summed, count.tolist(), strict=False):
            parameter.grad = gradient.view_as(parameter) if given else None  # the optimizer leaves alone what had none
        averages = [value / count[-1] for value in summed[len(self.parameters) :]]
        self.buffers.put_back(dict(zip(self._floating, averages, strict=True)))
        self.buffers.put_back({name: ends[name] for name in self._whole})
        if self.world.size > 1:
            broadcast(self.buffers.own[name] for name in self._whole)
        return loss[0] if self.world.is_first else torch.zeros_like(loss[0])


def _seed(seed: int, step: int, number: int) -> None:
    """All that a slice draws at random is its own."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{number}".encode()).digest()[:7])
    seed_generators(key)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(key)


def _pack(tensors: Iterable[Tensor], *, multiple: int) -> dict[torch.dtype, Tensor]:
    """One new flat vector for each type, in the order of the tensors, filled up to a `multiple` of elements."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.detach().flatten())
    for parts in of_type.values():
        parts.append(parts[0].new_zeros(-sum(part.numel() for part in parts) % multiple))
    return {dtype: torch.cat(parts) for dtype, parts in of_type.items()}


def _unpack(vectors: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
    """What `_pack` made flat, as views of the sizes of `likes`."""
    rest = {vector.dtype: vector for vector in vectors}
    found = []
    for like in likes:
        vector = rest[like.dtype]
        found.append(vector[: like.numel()].view(like.shape))
        rest[like.dtype] = vector[like.numel() :]
    return found
