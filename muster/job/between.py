"""What optimizers are in the middle of when a loop of a user's own saves: a step not yet counted, gradients not yet used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.dist.pieces import in_pieces
from muster.errors import ConfigError


class Between:
    """Follows the steps of `optimizers` between two calls of `Job.step`.

    Args:
        optimizers: name -> optimizer.
        names: parameter -> its name in checkpoints.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], names: Mapping[Tensor, str]):
        self._optimizers, self._names = optimizers, names
        self._stepped, self._begun = set[str](), set[str]()
        self._idle = set[str]()  # a fresh or restored optimizer has no gradients
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of other libraries have none
                optimizer.register_step_pre_hook(partial(self._begin, name))
                optimizer.register_step_post_hook(partial(self._end, name))

    def count(self) -> None:
        """Count a step of the job."""
        self._idle, self._stepped = self._optimizers.keys() - self._stepped, set()

    def _begin(self, name: str, _: object, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        has_closure = any(
            map(callable, (*given[1:], *named.values()))
        )  # which makes the pass of the step, before any change
        if not has_closure:
            self._begun.add(name)

    def _end(self, name: str, *_: object) -> None:
        self._begun.discard(name)
        self._stepped.add(name)

    def is_within(self) -> bool:
        """Return True in an optimizer's step, which may have collectives of its own, or after one that the job has not counted."""
        return bool(self._stepped or self._begun)

    def refuse(self, what: str) -> None:
        """Raise ConfigError after an optimizer's step that the job has not counted: weights and position do not fit."""
        if self._stepped:
            raise ConfigError(
                f"{what} came after {min(self._stepped)}.step() and before job.step(): call it after job.step(), which "
                "counts the optimizer's step"
            )

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that optimizers which made no step in the last one still accumulate, by parameter."""
        return {
            name: parameter.grad.to_local() if in_pieces(parameter.grad) else parameter.grad
            for name, parameter in self._pending()
            if parameter.grad is not None
        }

    def zeroed(self) -> list[str]:
        """Return the parameters whose gradients are there, and of no more use.

        An optimizer skips a parameter without a gradient, but not one whose gradient a loop has set to zero.
        """
        pending = self.gradients()
        trained = (each for one in self._optimizers.values() for group in one.param_groups for each in group["params"])
        return sorted({self._names[each] for each in trained if each.grad is not None} - pending.keys())

    def restore(self, gradients: Mapping[str, Tensor], zeroed: Collection[str] = ()) -> None:
        """Restore the values of `gradients` and `zeroed`."""
        for parameter, name in self._names.items():
            if name in gradients:
                parameter.grad = _like(parameter, gradients[name])
            elif name in zeroed:
                parameter.grad = torch.zeros_like(parameter)
        self._idle = {
            name
            for name, optimizer in self._optimizers.items()
            if any(self._names[each] in gradients for group in optimizer.param_groups for each in group["params"])
        }

    def _pending(self) -> Iterator[tuple[str, Any]]:
        for name in sorted(self._idle):
            for group in self._optimizers[name].param_groups:
                yield from ((self._names[parameter], parameter) for parameter in group["params"])


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a gradient in the layout of its parameter."""
    local = local.to(parameter.device)
    if not in_pieces(parameter):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
