"""Tensors that are replicated on all ranks of a user's loop, and may yet differ: buffers legitimately, parameters by mistake.

DistributedDataParallel broadcasts rank 0's buffers (batch-norm statistics) before each forward pass only, so after a
step those of the other ranks differ. A checkpoint must have the buffers of one rank, not some of each.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.digests import digest_of
from muster.checkpoint.trained import own_prefix, plain
from muster.errors import ConfigError
from muster.world.dtensor import in_pieces
from muster.world.group import World

LOOKED_AT = 8
"""Number of elements of a tensor that are compared beside the sum of its bits."""
TOLERANCE = 1e-3
"""The largest difference by rounding, as on hosts with different processors, in parts of the largest element."""


class _Sum(nn.Module):
    """A module whose gradients are zero, and come in the reverse order of `parameters`."""

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__()
        self._parameters_of_another = [*parameters]

    def forward(self) -> Tensor:
        return torch.stack([(each * 0).sum().double() for each in self._parameters_of_another]).sum()


def wrappers(modules: Collection[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules that wrap `modules`."""
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for inner in modules for each in found if each.module is inner]


def hooks_with_state(modules: Collection[nn.Module]) -> list[tuple[str, Any]]:
    """Return (name, state) of each communication hook of the `wrappers` that has a state of its own, as PowerSGD's."""
    hooks = [each for module in wrappers(modules) for each in getattr(module, "_comm_hooks", ())]
    return [
        (getattr(hook, "__name__", str(hook)), state)
        for hook, state in hooks
        if state is not None and not isinstance(state, dist.ProcessGroup)
    ]


def settle_buckets(modules: Collection[nn.Module], world: World) -> None:
    """Have DistributedDataParallel lay out its buckets for good, by a backward pass of zeros. Collective.

    It does so after its first backward pass, in the order in which the gradients came. With three or more ranks the place
    of a gradient in a bucket is the order of its summands, so the first step of each attempt would round otherwise than
    in a run without an interruption. With `static_graph=True` it still does: that records its first pass.

    modules: the modules inside of DistributedDataParallel, whichever of the two is tracked.
    """
    if world.size < 3:
        return
    for module in wrappers(modules):
        if module.static_graph or module.find_unused_parameters or not module.require_backward_grad_sync:
            continue
        trained = [each for each in module.module.parameters() if each.requires_grad]
        own, broadcasts, grads = module.module, module.broadcast_buffers, [each.grad for each in trained]
        module.module, module.broadcast_buffers = _Sum(trained), False
        for each in trained:
            each.grad = None  # or the pass would divide what is there by the number of ranks, in place
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
        f"{name}/{plain(inner)}"
        for name, module in modules.items()
        for inner, buffer in module.named_buffers(remove_duplicate=False)
        if not in_pieces(buffer)
    }


def kept_buffers(buffers: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the buffers to save: rank 0's; if any differ, also those of each other rank, as its own state. Collective."""
    digests = world.gather([*buffers, digest_of(buffers.values())])
    if all(each == digests[0] for each in digests) or world.is_first:
        return dict(buffers)
    return {f"{own_prefix(world.rank)}{name}": buffer for name, buffer in buffers.items()}


def check_replicas(named: Mapping[str, Tensor], world: World, *, tolerance: float, what: str, remedy: str) -> None:
    """Compare each replicated tensor with rank 0's. Collective.

    Raises ConfigError: a tensor differs by more than `tolerance` times rank 0's largest element.
    """
    apart = first_apart(named, world, tolerance=tolerance)
    world.together(ConfigError(f"{what} {apart} differs from rank 0's: {remedy}") if apart else None)


def first_apart(named: Mapping[str, Tensor], world: World, *, tolerance: float = 0.0) -> str:
    """Return the first of the replicated tensors that differs from rank 0's; empty if none does. Collective.

    It compares each tensor's sum of bits and some elements, and where they differ, all: only some rows of an embedding may differ.
    """
    if world.size == 1:
        return ""
    own = {name: each.detach() for name, each in named.items() if not (in_pieces(each) or each.is_quantized)}
    sums = {name: [*each.shape, _bits(each)] for name, each in own.items()}
    if len({*world.gather(hashlib.sha256(repr(sums).encode()).hexdigest())}) == 1:
        return ""
    first: dict[str, list[int]] = world.broadcast(sums)
    shapes, theirs = ({name: each[:-1] for name, each in found.items()} for found in (sums, first))
    lone = sorted(name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name))
    if world.lowest(bool(lone)) is not None:
        return lone[0] if lone else ""
    apart = {name for names in world.gather([each for each in sums if sums[each] != first[each]]) for name in names}
    for name in sorted(apart):
        is_apart = _is_apart(own[name].cpu(), of_rank_0(own[name], world), tolerance)
        if world.lowest(is_apart) is not None:
            return name if is_apart else ""
    return ""


def _is_apart(own: Tensor, of_first: Tensor, tolerance: float) -> bool:
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(own, of_first)
    own, of_first = own.to(torch.complex128), of_first.to(torch.complex128)
    return bool(((own - of_first).abs() > tolerance * of_first.abs().max()).any())


def of_rank_0(tensor: Tensor, world: World) -> Tensor:
    """Return rank 0's values of a tensor that has the same shape on all ranks, on the CPU. Collective."""
    values = tensor.detach().cpu().contiguous().flatten().clone()
    dist.broadcast(values.view(torch.uint8), 0, group=world.group)  # as bytes: gloo does not support every dtype
    return values.view(tensor.shape)


def _bits(tensor: Tensor) -> list[Any]:
    """Return the sum of a tensor's bits, in int64 words and remaining bytes, and some of its elements: a sum knows no order."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous().flatten()
    if not flat.numel():
        return []
    octets = flat.view(torch.uint8)
    words = len(octets) // 8 * 8
    total = int(octets[:words].view(torch.int64).sum()) + int(octets[words:].sum())
    return [total, flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT].double().tolist()]


def bits_of(tensor: Tensor) -> str:
    """Return what tells a tensor's values from others, by one pass over them where they are; of a sparse one, a digest."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return digest_of([tensor])
    return f"{[*tensor.shape]} {tensor.dtype} {_bits(tensor.detach())}"
