"""Broadcast of one rank's values, so that replicas start equal whatever was drawn at random when they were built."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def begin_alike(module: nn.Module, *, by: torch.device | None = None) -> None:
    """Broadcast the parameters and buffers of rank 0 to all ranks; by: as for `broadcast`. Collective.

    Call it before a module is sharded: shards of different models do not form one model.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        broadcast((*module.parameters(), *module.buffers()), by=by)


def broadcast(
    tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None, by: torch.device | None = None
) -> None:
    """Broadcast the values of the first rank of `group` (None: all ranks) to the others. Collective.

    by: device to send from, if tensors may be on other devices.
    """
    for tensor in tensors:
        raw = (
            tensor.detach().to(by or tensor.device).contiguous().flatten().view(torch.uint8)
        )  # as bytes: gloo does not support every dtype
        dist.broadcast(raw, group=group, group_src=0)
        with torch.no_grad():
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
