"""Mean over ranks, norm and clipping of gradients, some of which may lie in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.dist.pieces import in_pieces, own_piece


def average(gradients: Iterable[Tensor], *, group: dist.ProcessGroup) -> None:
    """Put the mean over the ranks of `group` in place of each gradient, of what lies in pieces piece by piece. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in map(own_piece, gradients):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat / group.size(), [gradient.numel() for gradient in alike])
        for gradient, part in zip(alike, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """[] the L2 norm of all `gradients` together, the same on every rank that holds a piece. Collective where sharded."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if in_pieces(gradient) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if in_pieces(norm) else norm for norm in norms] or [torch.zeros(())]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale the gradients of `parameters` so that their total norm, which is `norm`, is `limit` at most."""
    if not any(in_pieces(parameter) for parameter in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        own_piece(gradient).mul_(factor)
