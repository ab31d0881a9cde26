"""One rank's values for all: whatever a model or an objective draws as it is built, its replicas begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def begin_alike(module: nn.Module, *, by: torch.device | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0, however each rank has drawn its own. Collective.

    To be called before a module is divided: pieces of models that differ are not a model.

    by: the device to send from, where ranks have the module on different ones.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        broadcast((*module.parameters(), *module.buffers()), by=by)


def broadcast(
    tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None, by: torch.device | None = None
) -> None:
    """Give every rank of `group` (None: all) the values of the first. Collective.

    by: the device that the group sends from, where tensors may lie on others.
    """
    for tensor in tensors:
        raw = (
            tensor.detach().to(by or tensor.device).contiguous().flatten().view(torch.uint8)
        )  # gloo does not know every type
        dist.broadcast(raw, group=group, group_src=0)
        with torch.no_grad():
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
