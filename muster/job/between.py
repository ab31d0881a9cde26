"""What optimizers are in the middle of when a loop of a user's own saves: a step not yet counted, gradients not yet used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.dist.pieces import in_pieces
from muster.errors import ConfigError


class Between:
    """Follows the steps of `optimizers` between two calls of `Job.step`.

    Gradients of an optimizer that has made its step may be left, too: a backward pass for another one's loss has added to them, or
    one that belongs to the next step. Whether the loop uses them or throws them away shows at their next use.

    Args:
        optimizers: name -> optimizer.
        names: parameter -> its name in checkpoints.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], names: Mapping[Tensor, str]):
        self._optimizers, self._names = optimizers, names
        self._stepped, self._begun = set[str](), set[str]()
        self._idle = set[str]()  # a fresh or restored optimizer has no gradients
        self._used: dict[str, list[tuple[Any, Any, int]]] = {}
        """By optimizer, its parameters, their gradients in its last step and the versions of these."""
        self._left: dict[str, list[Any]] = {}
        """By optimizer, the parameters whose gradients have been added to since."""
        self._thrown_away = set[str]()
        """The optimizers whose gradients of this kind the loop has thrown away, the last time."""
        self._watched: dict[str, Any] = {}
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of other libraries have none
                optimizer.register_step_pre_hook(partial(self._begin, name))
                optimizer.register_step_post_hook(partial(self._end, name))

    def count(self) -> None:
        """Count a step of the job."""
        self._idle, self._stepped = self._optimizers.keys() - self._stepped, set()

    def end_step(self) -> None:
        """Take notice of the gradients that are left at the end of a step of the job, and of the loop's body."""
        self._left = {name: left for name, used in self._used.items() if (left := [*_added_to(used)])}
        for name in self._left.keys() - self._watched.keys():
            parameter = self._left[name][0]
            self._watched[name] = parameter.register_hook(partial(self._see, name, ref(parameter)))

    def _see(self, name: str, parameter: Callable[[], Any], _: Tensor) -> None:
        """Notice, before a backward pass adds to a gradient, whether the loop has thrown away what was left of it."""
        self._watched.pop(name).remove()
        there = parameter()
        if there is None or there.grad is None or _is_zero(there.grad):
            self._thrown_away.add(name)
        else:
            self._thrown_away.discard(name)

    def _begin(self, name: str, _: object, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        has_closure = any(
            map(callable, (*given[1:], *named.values()))
        )  # which makes the pass of the step, before any change
        if (watch := self._watched.pop(name, None)) is not None and not has_closure:
            watch.remove()
            self._thrown_away.discard(name)
        if not has_closure:
            self._begun.add(name)

    def _end(self, name: str, optimizer: Optimizer, *_: object) -> None:
        trained = (each for group in optimizer.param_groups for each in group["params"])
        self._used[name] = [
            (each, *((ref(each.grad), each.grad._version) if each.grad is not None else (None, 0))) for each in trained
        ]
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
        """Return the gradients that are yet to be used, by parameter.

        They are those of optimizers which made no step in the last one, and those that are left after a step, unless the loop throws
        these away.
        """
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
        for name in sorted(self._left.keys() - self._idle - self._thrown_away):
            left = [each for each in self._left[name] if each.grad is not None]
            yield from ((self._names[each], each) for each in left if not _is_zero(each.grad))


def _added_to(used: list[tuple[Any, Any, int]]) -> Iterator[Any]:
    for parameter, grad, version in used:
        now = parameter.grad
        if now is not None and (grad is None or now is not grad() or now._version != version):
            yield parameter


def _is_zero(grad: Any) -> bool:
    """Return True for a gradient that a loop has set to zero, as far as this rank's piece shows."""
    own = grad.to_local() if in_pieces(grad) else grad
    return own.layout is torch.strided and not bool(own.any())


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a gradient in the layout of its parameter."""
    local = local.to(parameter.device)
    if not in_pieces(parameter):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
