"""What is replicated on all ranks of a loop of a user's own, and may yet differ: buffers legitimately, parameters by mistake.

DistributedDataParallel broadcasts rank 0's buffers (batch-norm statistics) before each forward pass only, so after a
step those of the other ranks differ. A checkpoint must have the buffers of one rank, not some of each.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.state import as_bytes, host_copy
from muster.checkpoint.trained import own_prefix
from muster.dist.pieces import in_pieces
from muster.dist.world import World
from muster.errors import ConfigError

LOOKED_AT = 8
"""Number of elements of a parameter that are compared between ranks."""
TOLERANCE = 1e-3
"""The largest difference by rounding, as on hosts with different processors, in parts of the largest element."""


class _Sum(nn.Module):
    """A module whose gradients are zero, and are there in the reverse order of `parameters`."""

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__()
        self._parameters_of_another = [*parameters]

    def forward(self) -> Tensor:
        return torch.stack([(each * 0).sum().double() for each in self._parameters_of_another]).sum()


def settle_buckets(modules: Collection[nn.Module], world: World) -> None:
    """Have DistributedDataParallel lay out its buckets for good, by a backward pass of zeros. Collective.

    It does so after its first backward pass, in the order in which the gradients came. With three or more ranks the place
    of a gradient in a bucket is the order of its summands, so the first step of each attempt would round otherwise than it
    does in a run without an interruption. With `static_graph=True` it does: that records its first pass.

    Args:
        modules: the modules inside of DistributedDataParallel, whether this is tracked or they are.
        world: the ranks.
    """
    if world.size < 3:
        return
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    for module in (each for inner in modules for each in found if each.module is inner):
        if module.static_graph or module.find_unused_parameters or not module.require_backward_grad_sync:
            continue
        trained = [each for each in module.module.parameters() if each.requires_grad]
        own, broadcasts, grads = module.module, module.broadcast_buffers, [each.grad for each in trained]
        module.module, module.broadcast_buffers = _Sum(trained), False
        try:
            with torch.enable_grad():
                module().backward()
        finally:
            module.module, module.broadcast_buffers = own, broadcasts
            for each, grad in zip(trained, grads, strict=True):
                each.grad = grad


def names_of_buffers(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names `MODULE/BUFFER` of all buffers of which every rank has a whole one."""
    return {
        f"{name}/{inner}"
        for name, module in modules.items()
        for inner, buffer in module.named_buffers(remove_duplicate=False)
        if not in_pieces(buffer)
    }


def kept_buffers(buffers: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the buffers to save: rank 0's, and where they differ also those of each other rank, as its own state.

    Collective: every rank must call it.
    """
    digests = world.gather(_digest(buffers)) if buffers else [""]
    if len({*digests}) == 1 or world.is_first:
        return dict(buffers)
    return {f"{own_prefix(world.rank)}{name}": buffer for name, buffer in buffers.items()}


def check_replicas(modules: Mapping[str, nn.Module], world: World, *, tolerance: float, remedy: str) -> None:
    """Compare some elements of each replicated parameter with rank 0's. Collective: every rank must call it.

    Raises:
        ConfigError: a parameter differs by more than `tolerance` times its largest element.
    """
    apart = _first_apart(modules, world, tolerance=tolerance)
    world.together(ConfigError(f"the parameter {apart} differs from rank 0's: {remedy}") if apart else None)


def are_apart(modules: Mapping[str, nn.Module], world: World) -> bool:
    """Return whether some rank's replicated parameters differ from rank 0's. Collective: every rank must call it."""
    return world.lowest(bool(_first_apart(modules, world, tolerance=0.0))) is not None


def _first_apart(modules: Mapping[str, nn.Module], world: World, *, tolerance: float) -> str:
    """Return the first parameter that differs from rank 0's; empty if none does. Collective."""
    if world.size == 1:
        return ""
    own = dict(_samples(modules))
    first = world.broadcast([*own.values()])
    return next((name for name, theirs in zip(own, first, strict=True) if _is_apart(own[name], theirs, tolerance)), "")


def _samples(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, list[float]]]:
    for name, module in modules.items():
        for inner, parameter in module.named_parameters():
            if not in_pieces(parameter) and parameter.is_floating_point():
                flat = parameter.detach().flatten()
                yield f"{name}/{inner}", flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT].double().tolist()


def _is_apart(own: list[float], first: list[float], tolerance: float) -> bool:
    largest = max(map(abs, first), default=0.0)
    return any(abs(one - other) > tolerance * largest for one, other in zip(own, first, strict=True))


def _digest(buffers: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers.values():
        digest.update(as_bytes(host_copy(buffer)))
    return digest.hexdigest()
