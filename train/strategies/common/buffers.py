"""The model's buffers (batch-norm statistics), of which ranks that train have different ones.

Each rank's come of its own samples. DDP begins a step's first forward with the first rank's (its `broadcast_buffers`), so
there they differ by one step; elsewhere every rank goes on with its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.dist.world import World
from train.strategies.common.broadcast import broadcast


class Buffers:
    """What the ranks' buffers are to evaluation and to whoever loads the weights: one value for all.

    Averaged in floating point, the first rank's otherwise. The ranks' own go on undisturbed, so that it makes no difference
    to training when and whether somebody looked.

    Args:
        group: the ranks whose buffers are one model's; None: all.
    """

    def __init__(self, model: nn.Module, world: World, *, group: dist.ProcessGroup | None = None):
        self.own = dict(model.named_buffers())
        self._size = dist.get_world_size(group) if group else world.size
        self._group, self._device = group, world.device
        self._shared: dict[str, Tensor] | None = None

    def shared(self) -> dict[str, Tensor]:
        """The common values, until `forget`. Collective."""
        if self._size == 1:
            return self.own
        if self._shared is None:
            self._shared = {name: buffer.clone() for name, buffer in self.own.items()}
            self._average([buffer for buffer in self._shared.values() if buffer.is_floating_point()])
            whole = [buffer for buffer in self._shared.values() if not buffer.is_floating_point()]
            broadcast(whole, group=self._group, by=self._device)
        return self._shared

    def forget(self) -> None:
        """The ranks' own have changed."""
        self._shared = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The model has the common values inside, and afterwards its own again. Collective."""
        if self._size == 1 or not self.own:
            yield
            return
        shared, kept = self.shared(), self.copy()
        self.put_back(shared)
        try:
            yield
        finally:
            self.put_back(kept)

    def copy(self) -> dict[str, Tensor]:
        """This rank's own, as they are now."""
        return {name: buffer.clone() for name, buffer in self.own.items()}

    def put_back(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.own[name].copy_(value)

    def _average(self, buffers: list[Tensor]) -> None:
        if not buffers:
            return
        # In float64: exact where the ranks agree already. On one device: a model may be spread over several.
        total = torch.cat([buffer.flatten().to(self._device, torch.float64) for buffer in buffers])
        dist.all_reduce(total, group=self._group)
        parts = torch.split(total / self._size, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
