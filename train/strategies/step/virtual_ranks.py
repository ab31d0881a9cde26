"""An optimizer step with the gradient of `virtual_world_size` ranks, independent of the real world size.

Each slice of the global batch starts from the same parameters, buffers and random state on whatever rank computes it.
The slices' results (gradient, buffers, share of the loss) are summed by one tree over the slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.tensor_versions import Changes
from muster.data.generators import key_of, seed_generators
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.sample_plan import leaves_of
from muster.train.strategies.base import Recipe
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.train.strategies.replicas.buffers import differs, from_float64, in_float64, is_averaged
from muster.train.strategies.step.optimizer_step import OptimizerStep
from muster.world.reduce.tree import TreeSum

BATCHES = "num_batches_tracked"
"""Batch norm's count of updates: one per step, because its running statistics are averaged over the slices."""


class SlicedStep(OptimizerStep):
    """An OptimizerStep on an unwrapped replica; all ranks end a step with bitwise equal results.

    The sums are over flat vectors, one per dtype. They contain gradients, buffers, the number of slices with a gradient
    per parameter, the number of slices that changed each buffer, the loss, and the number of slices with samples.

    A buffer that no slice changed is kept. A floating-point buffer is averaged in float64 over the slices with samples.
    An integer buffer is a count, to which the slices' changes are added. An element of a bool buffer flips if it
    changes in any slice.

    slices: their number, `virtual_world_size`. parts: the remaining arguments of OptimizerStep.
    """

    def __init__(self, recipe: Recipe, *, slices: int, **parts: Any):
        super().__init__(recipe, **parts)
        self.slices = slices
        self.loss = torch.zeros(())  # of the last step, the same on every rank
        self.buffers.agree = True
        self._changes = Changes(self.model.named_parameters(), looks=slices)
        begin_alike(self.model)

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        """Compute the global batch's gradient; return its loss on rank 0 and zero on other ranks, []. Collective."""
        world, kept = self.world, self.buffers.copy()
        start = {name: buffer.clone() for name, buffer in self.buffers.own.items()}
        by_slice = {number: list(micro) for number, micro in groupby(batches, key=lambda batch: batch.slice)}
        trees: list[TreeSum] = []
        for number in leaves_of(world.rank, world.size, self.slices):
            try:
                flat = self._slice(step, number, by_slice.get(number, []), start)
            finally:
                self.buffers.put_back(
                    kept
                )  # also if another rank is lost meanwhile: what is handed on is of the step before
            trees = trees or [
                TreeSum(self.slices, rank=world.rank, world_size=world.size, memory=world.memory, hosts=world.hosts)
                for _ in flat
            ]
            for tree, vector in zip(trees, flat, strict=True):
                tree.add(number, vector)
        if self.before_sum:
            self.before_sum(step, None, self._measured)
        return self._take([tree.total() for tree in trees], start)

    def update(self, step: int, norm: Tensor | None) -> bool:
        """Update the parameters as OptimizerStep does, with generators seeded alike on every rank."""
        _seed(self.recipe.seed, step, self.slices)
        return super().update(step, norm)

    def _slice(self, step: int, number: int, batches: list[Batch], start: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute one slice; return its vectors for the sums, one per dtype."""
        _seed(self.recipe.seed, step, number)
        self._changes.look()
        shares = [self._share(batch, last=batch is batches[-1]) for batch in batches]
        self._refuse_changed()
        loss = torch.stack(shares).sum() if shares else torch.zeros((), device=self.world.device)
        parameters, ends = self.parameters, self.buffers.own
        self._see_sizes(start, ends)
        used = [float(parameter.grad is not None) for parameter in parameters]
        count = torch.tensor([*used, float(bool(batches))], device=self.world.device)
        values = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        buffers = [_given(name, start[name], end, number if batches else None) for name, end in ends.items()]
        changed = [differs(start[name], end).any().float().reshape(1) for name, end in ends.items()]
        everything = [*values, *buffers, count, *changed, loss.float().reshape(1)]
        return list(_pack(everything, multiple=self.world.size).values())

    def _take(self, totals: list[Tensor], start: Mapping[str, Tensor]) -> Tensor:
        """Store the summed gradients and buffers on this rank; return the loss on rank 0, zero on others, []."""
        parameters, device = self.parameters, self.world.device
        given = [_given(name, value, value, None) for name, value in start.items()]
        more = [torch.empty(size, device=device) for size in (len(parameters) + 1 + len(start), 1)]
        *summed, count, loss = _unpack(totals, [*parameters, *given, *more])
        counts = count.tolist()
        for parameter, gradient, used in zip(parameters, summed, counts, strict=False):
            parameter.grad = gradient.view_as(parameter) if used else None  # the optimizer skips None
        changed = zip(start.items(), summed[len(parameters) :], counts[len(parameters) + 1 :], strict=True)
        with_samples = counts[len(parameters)]
        self.buffers.put(
            {name: _taken(value, total, with_samples) for (name, value), total, slices in changed if slices}
        )
        self.loss = loss[0]
        return loss[0] if self.world.is_first else torch.zeros_like(loss[0])

    def _refuse_changed(self) -> None:
        """Raise ConfigError if a forward pass has changed a parameter, as that of a momentum teacher: the next slice sees it."""
        if not (name := self._changes.changed() or self._changes.changed_unseen()):
            return
        raise ConfigError(
            f"virtual_world_size={self.slices}: the forward pass has changed the parameter {name}, so the weights would depend on the "
            "number of ranks: keep it in a buffer, self.register_buffer(...), which starts each slice alike"
        )

    def _see_sizes(self, start: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if a buffer changed its shape or dtype in this slice, so that it cannot be summed."""
        if start.keys() == ends.keys() and all(_alike(start[name], end) for name, end in ends.items()):
            return
        for name in sorted({*start, *ends}):
            before, after = (
                f"{list(of[name].shape)} {of[name].dtype}" if name in of else "none" for of in (start, ends)
            )
            if before != after:
                raise ConfigError(
                    f"virtual_world_size={self.slices}: the buffer {name} was {before} and is {after} after a forward pass, so "
                    "the slices' buffers cannot be combined: give it its size and type in the constructor"
                )


def _alike(start: Tensor, end: Tensor) -> bool:
    return start.shape == end.shape and start.dtype == end.dtype


def _given(name: str, start: Tensor, end: Tensor, slice_number: int | None) -> Tensor:
    """Return a slice's term in the sum of a buffer. A slice without samples has number None and contributes zeros."""
    if is_averaged(end):
        return in_float64(end) if slice_number is not None else torch.zeros_like(in_float64(end))
    if end.dtype is torch.bool:
        return (start ^ end).long()
    counts = slice_number == 0 or name.rpartition(".")[2] != BATCHES
    return (end.long() - start.long()) * counts


def _taken(start: Tensor, total: Tensor, with_samples: float) -> Tensor:
    """Return a buffer's value after the step from its value before and the sum over the slices."""
    if is_averaged(start):
        return from_float64(total / with_samples, start)
    return start ^ (total > 0) if start.dtype is torch.bool else (start.long() + total).to(start.dtype)


def _seed(seed: int, step: int, number: int) -> None:
    seed_generators(key_of(seed, step, number), on_device=True)


def _pack(tensors: Iterable[Tensor], *, multiple: int) -> dict[torch.dtype, Tensor]:
    """Flatten tensors into one new vector per dtype, in order, zero-padded to a `multiple` of elements."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.detach().flatten())
    for parts in of_type.values():
        parts.append(parts[0].new_zeros(-sum(part.numel() for part in parts) % multiple))
    return {dtype: torch.cat(parts) for dtype, parts in of_type.items()}


def _unpack(vectors: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
    """Undo `_pack`: return views into `vectors` with the shapes of `likes`."""
    rest = {vector.dtype: vector for vector in vectors}
    found = []
    for like in likes:
        vector = rest[like.dtype]
        found.append(vector[: like.numel()].view(like.shape))
        rest[like.dtype] = vector[like.numel() :]
    return found
