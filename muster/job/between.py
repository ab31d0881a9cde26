"""What optimizers are in the middle of when a loop of a user's own saves: a step not yet counted, gradients not yet used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
        self._stepped = set[str]()
        self._idle = set[str]()  # a fresh or restored optimizer has no gradients
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of other libraries have none
                optimizer.register_step_post_hook(lambda *_, name=name: self._stepped.add(name))

    def count(self) -> None:
        """Count a step of the job."""
        self._idle, self._stepped = self._optimizers.keys() - self._stepped, set()

    def is_within(self) -> bool:
        """Return True after an optimizer's step that the job has not counted."""
        return bool(self._stepped)

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

    def restore(self, gradients: Mapping[str, Tensor]) -> None:
        """Restore the value of `gradients`."""
        for parameter, name in self._names.items():
            if name in gradients:
                parameter.grad = _like(parameter, gradients[name])
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
