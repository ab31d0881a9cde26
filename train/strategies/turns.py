"""Several parts of one model trained in turn, such as the generator and the discriminator of a GAN.

Source: Goodfellow et al., "Generative Adversarial Networks", 2014, algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.code_location import defined, described, name_of
from muster.data.loader import Batch
from muster.errors import ConfigError, nearest
from muster.train.config.keys import Config
from muster.train.objectives.counted import weighed
from muster.train.strategies.base import Recipe, StepResult
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping, build_model
from muster.world.group import World


@dataclass(kw_only=True, eq=False)
class Turns(Stepping):
    """One update of each of `parts` in order, on the same micro-batches; each rank holds the whole model.

    The model has a method `loss_of(part, inputs, targets)`, which returns the mean loss of a part over the micro-batch.
    In a part's turn only its own parameters require a gradient, and only they are updated; values of their own, such as a
    learning rate, are entries of `optimizer.groups`. A part is the name of a submodule.

    A `train` line has the loss of the last part, and with `log.train_metrics=true` that of each as `PART_loss`.
    """

    parts: list[str]

    honours = frozenset({"grad_clip", "log.train_metrics", "scheduler", "metrics"})

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if not self.parts:
            raise ConfigError("strategy=turns needs the submodules to train in turn: strategy.parts=[first,second]")

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, world.device)
        modules = dict(self.model.named_modules())
        for part in self.parts:
            if not part or part not in modules:
                names = [name for name, _ in self.model.named_children()]
                raise ConfigError(
                    f"strategy.parts has {part}, which {name_of(self.model)} has not; {nearest(part, names)}"
                )
        if not callable(getattr(self.model, "loss_of", None)):
            raise ConfigError(
                f"strategy=turns calls {name_of(self.model)}.loss_of(part, inputs, targets), which it has not"
                f"{defined(self.model, '__init__')}: write it, to return the mean loss of `part`"
            )
        self._turns: dict[str, list[nn.Parameter]] = {part: [*modules[part].parameters()] for part in self.parts}
        begin_alike(self.model)
        self.optimizer_step = OptimizerStep(recipe, world=world, layout=self.layout(world.size), model=self.model)

    def loss_by(self, recipe: Recipe) -> Any:
        """The model, which computes its parts' losses itself."""
        return self.model

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self.seed(step)
        inner = self.optimizer_step
        inner.set_training(True)
        measured, skipped = dict[str, Tensor](), False
        count = sum(batch.count for batch in batches)
        for part, parameters in self._turns.items():
            inner.optimizer.zero_grad()
            with _only(parameters, of=self.model):
                share = self._backward(part, batches)
                self._reduce(parameters)
            norm = inner.norm()
            skipped |= inner.update(step, norm)
            if inner.recipe.train_metrics and count:
                measured[f"{part}_loss"] = share.double() * batches[0].total
        inner.buffers.forget()
        return StepResult(share, norm, skipped, measured)

    def _backward(self, part: str, batches: list[Batch]) -> Tensor:
        """Accumulate the gradient of the global batch's mean loss of `part`; return this rank's share of it, []."""
        total = torch.zeros((), device=self.world.device)
        for batch in batches:
            loss: Any = self.model.loss_of(part, batch.inputs, batch.targets)  # type: ignore[operator]
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ConfigError(
                    f"{name_of(self.model)}.loss_of returns {described(loss)} for {part}{defined(self.model, 'loss_of')}: "
                    f"return the mean loss over the micro-batch, a tensor [] with a gradient of {part}'s parameters"
                )
            share = weighed(loss, batch.share, None)
            share.backward()  # type: ignore[no-untyped-call]
            total = total + share.detach().reshape(())
        return total

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        """Add up the gradients of all ranks: of shares of the global mean, the sum is its gradient. Collective."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # as on a rank that has used it
        if self.world.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            alike = [each for each in gradients if each.dtype == dtype]
            flat = torch.cat([each.flatten() for each in alike])
            dist.all_reduce(flat)
            pieces = torch.split(flat, [each.numel() for each in alike])
            for each, reduced in zip(alike, pieces, strict=True):
                each.copy_(reduced.view_as(each))


@contextlib.contextmanager
def _only(parameters: list[nn.Parameter], *, of: nn.Module) -> Iterator[None]:
    """Let none of the other parameters of the module require a gradient inside the context."""
    own = {id(parameter) for parameter in parameters}
    others = [parameter for parameter in of.parameters() if parameter.requires_grad and id(parameter) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
