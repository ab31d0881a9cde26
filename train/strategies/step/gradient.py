"""Mean over ranks, norm and clipping of gradients, which may be sharded or missing on some ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.errors import ConfigError
from muster.world.dtensor import in_pieces, own_piece
from muster.world.group import World


def complete(parameters: Mapping[str, Tensor], world: World, *, names: Sequence[str]) -> set[str]:
    """Fill in zeros for gradients that are missing on this rank but present on another rank. Collective.

    Ranks may use different parameters in a step (routing, stochastic depth), but all ranks must reduce the same list of
    gradients. A parameter without a gradient on any rank keeps none, so the optimizer skips it.

    `world`: all ranks, including those that hold other parts of the model. `names`: the parameter names of all ranks, in the same order on
    every rank. Returns those that have a gradient on any rank.
    """
    mine = {name for name, parameter in parameters.items() if parameter.grad is not None}
    used = used_anywhere(mine, world, names=names)
    for name, parameter in parameters.items():
        if name in used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used


def used_anywhere(used: Set[str], world: World, *, names: Sequence[str]) -> set[str]:
    """The subset of `names` that is in `used` on any rank; `names` has the same order on every rank. Collective."""
    counts = world.sum([float(name in used) for name in names])
    return {name for name, count in zip(names, counts, strict=True) if count}


def average(gradients: Iterable[Tensor], *, group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks of `group`; of a DTensor, the local shard. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in map(own_piece, gradients):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat / group.size(), [gradient.numel() for gradient in alike])
        for gradient, part in zip(alike, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def sparse_in(model: nn.Module) -> str | None:
    """Name of the first layer with sparse gradients, such as Embedding(sparse=True); None if there is none."""
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", None) is True), None)


def refuse_sparse(model: nn.Module, said: str) -> None:
    """Raise ConfigError if the model has sparse gradients, which the config's choice `said` does not support."""
    if name := sparse_in(model):
        raise ConfigError(
            f"{name} has sparse gradients, which {said} does not support: use sparse=False, or strategy=ddp or single"
        )


def refuse_hooks(model: nn.Module, said: str) -> None:
    """Raise ConfigError if a parameter has a hook on its gradient, which is lost where `said` replaces parameters."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{name} has a hook on its gradient, which {said} would leave out: hook a module in its place, or use "
                "strategy=ddp or single"
            )


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """[] L2 norm of all `gradients` together, the same on every rank that holds a shard. Collective if sharded."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if in_pieces(gradient) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if in_pieces(norm) else norm for norm in norms] or [torch.zeros(())]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale the gradients of `parameters`, whose total norm is `norm`, to a total norm of at most `limit`."""
    if not any(in_pieces(parameter) for parameter in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        own_piece(gradient).mul_(factor)
