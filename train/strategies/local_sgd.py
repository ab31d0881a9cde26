"""Local SGD: each rank trains a model of its own, and every so many steps all take the average of their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2018 (https://arxiv.org/abs/1805.09767). After a
warm-up it is post-local SGD: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018
(https://arxiv.org/abs/1808.07217). With an outer optimizer it is DiLoCo: Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023 (https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from train.checkpoint.trained import SavedTensor, own_prefix
from train.config.keys import Config, Precision
from train.config.marks import Ge, Gt
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, StepResult, Strategy
from train.strategies.common import state as flat
from train.strategies.common.optimizer_step import OptimizerStep
from train.strategies.common.replicas import Replicas


class LocalStep(OptimizerStep):
    """An optimizer step on the gradient of this rank alone; evaluated and saved is the average of the ranks' models.

    The ranks' own go on undisturbed, so that it makes no difference to training when and whether somebody looked.
    """

    apart: tuple[str, ...] = ()
    """What begins so in the state may differ between the ranks."""
    _average: list[Tensor] | None = None

    def step_alone(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step without the others, but that on_nonfinite=skip asks them whether to leave it out."""
        self.apart, self._average = ("model/", "optimizer/"), None
        return self.step(step, batches)

    def average(self) -> list[Tensor]:
        """The average of the ranks' `trained`, kept until the next step. Collective."""
        if self._average is None:
            self._average = mean(self.trained.values(), self.world)
        return self._average

    def take(self, values: Iterable[Tensor]) -> None:
        """Make them the values of `trained` on every rank."""
        with torch.no_grad():
            for parameter, value in zip(self.trained.values(), values, strict=True):
                parameter.copy_(value)
        self.apart, self._average = ("optimizer/",), None

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        with self._averaged():
            return super().evaluate(batch)

    def weights(self) -> dict[str, Any]:
        with self._averaged():
            return super().weights()

    def state(self) -> dict[str, Any]:
        """The averages, for any world size, and what is this rank's own, for a resume at the same one. Collective."""
        own, shared = self._values(), super().state()
        optimizer = [name for name in own if name.startswith("optimizer/")]
        shared |= dict(zip(optimizer, mean([own[name] for name in optimizer], self.world), strict=True))
        return shared | {f"{self._alone}{name}": value for name, value in own.items()}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        own = {
            name: torch.empty(facts.size, dtype=facts.dtype, device=self.world.device)
            for name, facts in saved.items()
            if name.startswith(self._alone)
        }
        shared = {name: t for name, t in super().targets(saved).items() if f"{self._alone}{name}" not in own}
        return shared | own

    def load(self, state: Mapping[str, Any]) -> None:
        own = {name.removeprefix(self._alone): v for name, v in state.items() if name.startswith(self._alone)}
        super().load({**state, **own})
        self.apart, self._average = tuple({f"{name.partition('/')[0]}/" for name in own}), None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @property
    def _alone(self) -> str:
        return f"{own_prefix(self.world.rank)}local/"

    def _values(self) -> dict[str, Tensor]:
        """What is `apart`, as this rank has it."""
        everything = self.model.named_parameters(remove_duplicate=False)
        model = {f"model/{name}": parameter.detach() for name, parameter in everything if parameter.requires_grad}
        values = flat.of_optimizer(self.optimizer, self.model)
        many = {name: v for name, v in values.items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()}
        return {name: value for name, value in {**model, **many}.items() if name.startswith(self.apart)}

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The model has the average inside, and afterwards its own again. Collective."""
        if "model/" not in self.apart:
            yield
            return
        self._swap(self.average())
        try:
            yield
        finally:
            self._swap(self.average())

    def _swap(self, average: list[Tensor]) -> None:
        for parameter, value in zip(self.trained.values(), average, strict=True):
            parameter.data, value.data = value.data, parameter.data

    def _must_skip(self, norm: Tensor) -> bool:
        """Of a rank's own gradient the others know nothing: they are asked where a step may be left out."""
        if not self.apart:
            return super()._must_skip(norm)
        return self.leaves_out and self.world.lowest(not bool(torch.isfinite(norm))) is not None


class Outer:
    """SGD with Nesterov's momentum on what a period has changed in the average.

    anchor: the parameters at the start of the period.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], *, lr: float, momentum: float):
        self.lr, self.momentum_factor = lr, momentum
        self.anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A period begins with these."""
        for anchor, parameter in zip(self.anchor.values(), parameters, strict=True):
            anchor.copy_(parameter.detach())

    def step(self, average: list[Tensor]) -> list[Tensor]:
        """The parameters that follow on a period that has led to `average`."""
        for anchor, momentum, value in zip(self.anchor.values(), self.momentum.values(), average, strict=True):
            change = anchor - value
            momentum.mul_(self.momentum_factor).add_(change)
            anchor.sub_(change.add_(momentum, alpha=self.momentum_factor), alpha=self.lr)
        return list(self.anchor.values())

    def state(self) -> dict[str, Tensor]:
        """The same on every rank."""
        anchor = {f"outer/anchor/{name}": value for name, value in self.anchor.items()}
        return anchor | {f"outer/momentum/{name}": value for name, value in self.momentum.items()}


class LocalSgd(Replicas):
    """DDP for `warm_up_steps`, and from then on an average every `every_steps`."""

    step_class = LocalStep
    optimizer_step: LocalStep
    honours = Replicas.honours

    def __init__(
        self,
        *,
        every_steps: Annotated[int, Ge(1)],
        warm_up_steps: Annotated[int, Ge(0)],
        outer: Literal["none", "nesterov"],
        outer_lr: Annotated[float, Gt(0)],
        outer_momentum: Annotated[float, Ge(0)],
    ):
        self.every_steps, self.warm_up_steps = every_steps, warm_up_steps
        self.outer_options = {"lr": outer_lr, "momentum": outer_momentum} if outer == "nesterov" else None
        self.outer: Outer | None = None

    @property
    def caveat(self) -> str:
        return "strategy=local_sgd: a resume at another world size starts all ranks from the average of their weights"

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if config.precision is Precision.fp16:
            raise ConfigError("strategy=local_sgd does not go with precision=fp16: use fp32 or bf16")

    def build(self, recipe: Recipe, world: World) -> None:
        super().build(recipe, world)
        if self.outer_options:
            self.outer = Outer(self.optimizer_step.trained, **self.outer_options)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step on this rank's samples, after the last of a period the average of the ranks. Collective."""
        if step < self.warm_up_steps:
            return super().step(step, batches)
        local, since = self.optimizer_step, (step - self.warm_up_steps) % self.every_steps
        local.forward, local.no_sync = self.model, contextlib.nullcontext  # which frees DDP and its buckets
        if self.outer and since == 0:
            self.outer.begin(local.trained.values())
        result = local.step_alone(step, batches)
        if since + 1 < self.every_steps:
            return result
        if not local.is_finite():
            return replace(result, skipped=True)
        local.take(self.outer.step(local.average()) if self.outer else local.average())
        return result

    def parameters(self) -> dict[str, nn.Parameter]:
        return Strategy.parameters(self)  # between averages and updates every rank has its own

    def sync_parameters(self) -> None:
        if "model/" in self.optimizer_step.apart:
            self.optimizer_step.take(self.optimizer_step.average())

    def state(self) -> dict[str, Any]:
        return super().state() | (self.outer.state() if self.outer else {})

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        outer = self.outer.state() if self.outer else {}
        return super().targets(saved) | {name: value for name, value in outer.items() if name in saved}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.outer and not any(name.startswith("outer/") for name in state):
            self.outer.begin(self.optimizer_step.trained.values())


def mean(tensors: Iterable[Tensor], world: World) -> list[Tensor]:
    """New tensors with the average of all ranks, in one all-reduce. Collective."""
    values = [tensor.detach() for tensor in tensors]
    if world.size > 1 and values:
        average_parameters(iter(values), dist.group.WORLD)  # type: ignore[arg-type]
    return values
