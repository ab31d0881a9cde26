"""Norm and clipping of gradients, some of which may lie in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """[] the L2 norm of all `gradients` together, the same on every rank that holds a piece. Collective where sharded."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale the gradients of `parameters` so that their total norm, which is `norm`, is `limit` at most."""
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
