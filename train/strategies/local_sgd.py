"""Local SGD: each rank trains its own model, and the ranks average their parameters every `every_steps` steps.

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2018 (https://arxiv.org/abs/1805.09767). After a
warm-up, it is post-local SGD: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018
(https://arxiv.org/abs/1808.07217). With an outer optimizer, it is DiLoCo: Douillard et al., "DiLoCo: Distributed
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

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import Ge, Gt
from muster.train.config.keys import Config, Precision
from muster.train.strategies import state as flat
from muster.train.strategies.base import Recipe, StepResult, Strategy
from muster.train.strategies.replicas.replicated import Replicas
from muster.train.strategies.step.optimizer_step import OptimizerStep
from muster.world.group import World


class LocalStep(OptimizerStep):
    """An optimizer step on this rank's own gradient.

    Evaluation and checkpoints use the average of the ranks' models, which does not change these, so that neither affects training.
    """

    apart: tuple[str, ...] = ()
    """Name prefixes of the state that may differ between the ranks."""
    _average: list[Tensor] | None = None

    def step_alone(self, step: int, batches: list[Batch]) -> StepResult:
        """Run one optimizer step without gradient exchange; collective only if steps may be skipped."""
        self.apart, self._average = ("model/", "optimizer/"), None
        return self.step(step, batches)

    def average(self) -> list[Tensor]:
        """The average of `trained` over the ranks, cached until the next step. Collective."""
        if self._average is None:
            self._average = mean(self.trained.values(), self.world)
        return self._average

    def take(self, values: Iterable[Tensor]) -> None:
        """Copy `values` into `trained`; they must be the same on every rank."""
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
        """Averages for any world size, and this rank's own values for a resume at the same one. Collective."""
        own, shared = self._values(), super().state()
        optimizer = [name for name in own if name.startswith("optimizer/")]
        shared |= dict(zip(optimizer, mean([own[name] for name in optimizer], self.world), strict=True))
        return shared | {f"{self._alone}{name}": value for name, value in own.items()}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Tensors to read this rank's own values into if they were saved, otherwise the averages."""
        own = {
            name: torch.empty(facts.size, dtype=facts.dtype, device=self.world.device)
            for name, facts in saved.items()
            if name.startswith(self._alone)
        }
        shared = {name: t for name, t in super().targets(saved).items() if f"{self._alone}{name}" not in own}
        return shared | own

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; this rank's own values, if present, replace the averages."""
        own = {name.removeprefix(self._alone): v for name, v in state.items() if name.startswith(self._alone)}
        super().load({**state, **own})
        self.apart, self._average = tuple({f"{name.partition('/')[0]}/" for name in own}), None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @property
    def _alone(self) -> str:
        return f"{own_prefix(self.world.rank)}local/"

    def _values(self) -> dict[str, Tensor]:
        """This rank's own values of the state in `apart`."""
        everything = self.model.named_parameters(remove_duplicate=False)
        model = {f"model/{name}": parameter.detach() for name, parameter in everything if parameter.requires_grad}
        values = flat.of_optimizer(self.optimizer, self.model)
        many = {name: v for name, v in values.items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()}
        return {name: value for name, value in {**model, **many}.items() if name.startswith(self.apart)}

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context manager: the model holds the averages inside, its own parameters again afterwards. Collective."""
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
        """The ranks' own gradients differ, so they agree on skipping a step. Collective if steps may be skipped."""
        if not self.apart:
            return super()._must_skip(norm)
        return self.leaves_out and self.world.lowest(not bool(torch.isfinite(norm))) is not None


class Outer:
    """The outer optimizer: SGD with Nesterov momentum on the change of the averaged parameters over a period.

    `anchor` holds the parameters' values at the start of the period.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], *, lr: float, momentum: float):
        self.lr, self.momentum_factor = lr, momentum
        self.anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        for anchor, parameter in zip(self.anchor.values(), parameters, strict=True):
            anchor.copy_(parameter.detach())

    def step(self, average: list[Tensor]) -> list[Tensor]:
        """Update the parameters after a period that ended at `average`; return the new values."""
        for anchor, momentum, value in zip(self.anchor.values(), self.momentum.values(), average, strict=True):
            change = anchor - value
            momentum.mul_(self.momentum_factor).add_(change)
            anchor.sub_(change.add_(momentum, alpha=self.momentum_factor), alpha=self.lr)
        return list(self.anchor.values())

    def state(self) -> dict[str, Tensor]:
        anchor = {f"outer/anchor/{name}": value for name, value in self.anchor.items()}
        return anchor | {f"outer/momentum/{name}": value for name, value in self.momentum.items()}


class LocalSgd(Replicas):
    """DDP for `warm_up_steps` steps, then local steps; every `every_steps` steps an average, to which the `outer` optimizer is applied."""

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
            raise ConfigError("strategy=local_sgd cannot be combined with precision=fp16: use fp32 or bf16")

    def build(self, recipe: Recipe, world: World) -> None:
        super().build(recipe, world)
        if self.outer_options:
            self.outer = Outer(self.optimizer_step.trained, **self.outer_options)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        if not self.is_alone(step):
            return super().step(step, batches)
        local, since = self.optimizer_step, (step - self.warm_up_steps) % self.every_steps
        local.forward, local.no_sync = self.model, contextlib.nullcontext  # frees DDP and its buckets
        if self.outer and since == 0:
            self.outer.begin(local.trained.values())
        self.seed(step)
        result = local.step_alone(step, batches)
        if since + 1 < self.every_steps:
            return result
        if not local.is_finite():
            return replace(result, skipped=True)
        local.take(self.outer.step(local.average()) if self.outer else local.average())
        return result

    def is_alone(self, step: int) -> bool:
        return step >= self.warm_up_steps

    def parameters(self) -> dict[str, nn.Parameter]:
        """Raise ConfigError: between two averages, the parameters differ between ranks."""
        return Strategy.parameters(self)

    def sync_parameters(self) -> None:
        if "model/" in self.optimizer_step.apart:
            self.optimizer_step.take(self.optimizer_step.average())

    def state(self) -> dict[str, Any]:
        return super().state() | (self.outer.state() if self.outer else {})

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        outer = self.outer.state() if self.outer else {}
        return super().targets(saved) | {name: value for name, value in outer.items() if name in saved}

    def load(self, state: dict[str, Any]) -> None:
        """Without a saved outer optimizer, a period starts from the loaded parameters."""
        super().load(state)
        if self.outer and not any(name.startswith("outer/") for name in state):
            self.outer.begin(self.optimizer_step.trained.values())


def mean(tensors: Iterable[Tensor], world: World) -> list[Tensor]:
    """Average `tensors` over all ranks into new tensors, in one all-reduce. Collective."""
    values = [tensor.detach() for tensor in tensors]
    if world.size > 1 and values:
        average_parameters(iter(values), dist.group.WORLD)  # type: ignore[arg-type]
    return values
