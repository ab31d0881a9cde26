"""Choose fused optimizer steps by parameter group, and keep unsupported gradients from torch's fused kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import ConfigError
from muster.train.config.keys import Precision
from muster.train.config.parts import Part
from muster.world.dtensor import in_pieces

SGD = "torch.optim.SGD"
ADAM = ("torch.optim.Adam", "torch.optim.AdamW")
DEVICES = ("cpu", "cuda")
BUFFER = "momentum_buffer"


def choose(
    optimizer: torch.optim.Optimizer, part: Part, *, precision: Precision, changing: Collection[str] = ()
) -> None:
    """Fuse the step of each group that allows it, if torch fuses it on both CPU and CUDA, unless the config chooses otherwise.

    changing: options of the groups that a schedule sets: a momentum of 0 may change.
    Raises ConfigError: the config requests a fused step that would compute something else.
    """
    if part.target not in (SGD, *ADAM):
        return
    ours = []
    for group in optimizer.param_groups:
        has_momentum = part.target == SGD and bool(group["momentum"] or "momentum" in changing)
        if group["fused"] and has_momentum and precision is Precision.fp16:
            # If the loss scaler makes it skip its first step, its momentum stays uninitialized.
            raise ConfigError(
                "optimizer.fused=true, with momentum, cannot be combined with precision=fp16: leave it out"
            )
        if group["fused"] and not _is_plain(group):
            raise ConfigError("optimizer.fused=true takes floating-point parameters on CPU or CUDA only: leave it out")
        ours.append(_fits(group, part.target, has_momentum=has_momentum) and precision is not Precision.fp16)
        if ours[-1]:
            group["fused"] = True
    guard = Guard(part.target, ours)
    optimizer.register_step_pre_hook(guard.before)
    optimizer.register_step_post_hook(guard.after)


def _fits(group: dict[str, Any], target: str, *, has_momentum: bool) -> bool:
    """Return True if a fused step is the same arithmetic for this group and the config does not choose otherwise."""
    chosen = group["fused"] is not None or group["foreach"] is not None
    if chosen or group["differentiable"] or group.get("capturable"):
        return False
    if target == SGD and ((has_momentum and group["dampening"]) or any(map(in_pieces, group["params"]))):
        return False  # torch has no fused SGD on DTensors; for dampening see Guard
    return _is_plain(group)


def _is_plain(group: dict[str, Any]) -> bool:
    return all(p.is_floating_point() and p.device.type in DEVICES for p in group["params"])


class Guard:
    """Hooks before and after each step that keep unsupported gradients from fused kernels.

    They depend only on the gradients and the state of the current step, so that a resume does the same.
    ours: for each group, True if the kit chose to fuse it.
    """

    def __init__(self, target: str, ours: list[bool]):
        self.target, self.ours = target, ours
        self._spared: list[dict[str, Any]] = []

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Convert sparse gradients to a form that the step accepts, and create missing momentum.

        Raises ConfigError: the optimizer accepts no sparse gradients, fused or not.
        """
        for group, chosen in zip(optimizer.param_groups, self.ours, strict=False):  # a model may add groups later
            if sparse := [parameter for parameter, gradient in _given(group) if gradient.is_sparse]:
                self._spare(group, sparse, chosen=chosen)
            if group["fused"] and group.get("momentum"):
                _begin_momentum(optimizer.state, group)

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Fuse the groups again that `before` unfused. A group that a strategy set to False stays unfused."""
        while self._spared:
            self._spared.pop()["fused"] = True

    def _spare(self, group: dict[str, Any], sparse: list[nn.Parameter], *, chosen: bool) -> None:
        """Keep gradients sparse in plain SGD, unfused for this step if the kit fused it; momentum and weight decay, of all rows, need dense ones."""
        if self.target in ADAM:
            raise ConfigError(
                f"{self.target} does not support sparse gradients, which Embedding(sparse=True) has: "
                "use sparse=False, optimizer=sgd or torch.optim.SparseAdam"
            )
        if chosen and not group["momentum"] and not group["weight_decay"]:
            if group["fused"]:
                self._spared.append(group)
                group["fused"] = False
            return
        for parameter in sparse:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_dense()


def _begin_momentum(state: Any, group: dict[str, Any]) -> None:
    """Create zero momentum for parameters whose first gradient comes later: torch initializes all of a group or none.

    The result is the same: torch's first step uses the gradient itself as momentum, and so does a later step that finds
    zeros, without dampening.
    """
    given = list(_given(group))
    late = [(p, gradient) for p, gradient in given if state.get(p, {}).get(BUFFER) is None]
    if late and len(late) < len(given):
        if group["dampening"]:
            raise ConfigError(
                "optimizer.fused=true, with dampening, does not support a parameter whose first gradient comes later: leave it out"
            )
        for parameter, gradient in late:
            state[parameter][BUFFER] = torch.zeros_like(gradient)


def _given(group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    return ((parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None)
