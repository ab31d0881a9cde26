"""Tensor parallelism: large layers are sharded over neighboring ranks, which work on the same samples.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.data.loader import Batch
from muster.errors import ConfigError, nearest
from muster.train.config.constraints import FREE, Ge
from muster.train.config.keys import Config
from muster.train.strategies.base import Recipe
from muster.train.strategies.fsdp import ShardedStep, units_of
from muster.train.strategies.partition.collective_order import Lockstep
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.train.strategies.step.gradient import average, complete, refuse_hooks
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping
from muster.train.strategies.supported_keys import refuse
from muster.world.group import World
from muster.world.layout import DATA, Layout

TENSOR = "tensor"
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
Plan = Mapping[str, str]
"""Pattern of a layer's name -> colwise (outputs are sharded) or rowwise (inputs are sharded)."""

# torch warns on every rank about sequential gathers over two mesh dimensions, which happen only once, for model.pt.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class TensorParallel(Stepping):
    """Layers are sharded over `tensor` ranks, samples are divided over the remaining dimension.

    shard: also shard the parameters over the ranks that divide the samples, as FSDP does.
    plan: pattern of a layer's name -> colwise or rowwise; None: the model's own `tensor_parallel_plan`.
    """

    honours = Stepping.honours

    def __init__(
        self,
        *,
        tensor: Annotated[int, Ge(1), FREE],
        shard: Annotated[bool, FREE],
        plan: Annotated[dict[str | int, Literal["colwise", "rowwise"]] | None, FREE],
    ):
        self.tensor, self.fully_sharded = tensor, shard
        self.plan: Plan | None = {str(name): style for name, style in plan.items()} if plan else None

    def layout(self, world_size: int) -> Layout:
        return Layout.of(world_size, data=-1, tensor=self.tensor)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        refuse(config, "tensor_parallel")

    def build(self, recipe: Recipe, world: World) -> None:
        """Build the model, shard its layers by the plan. Raises ConfigError: there is no plan, or it does not fit the model."""
        self.world, layout = world, self.layout(world.size)
        self.model = recipe.build_model().to(world.device)
        styles = divided_layers(self.model, self._plan(self.model), ranks=self.tensor)
        if world.size == 1:
            self.optimizer_step = OptimizerStep(recipe, world=world, layout=layout, model=self.model)
            return
        refuse_hooks(self.model, "a strategy that shards")
        begin_alike(self.model)
        self.mesh = layout.mesh(world.device.type)
        parallelize_module(self.model, self.mesh[TENSOR], {name: STYLES[style]() for name, style in styles.items()})
        data = self.mesh[DATA] if layout.sizes[DATA] > 1 else None
        lockstep = None
        if data and self.fully_sharded:
            lockstep = Lockstep(self.model, _shard(self.model, data), world, shards=layout.sizes[DATA])
        average_over = None if self.fully_sharded else data
        self.optimizer_step = TensorStep(
            recipe, world=world, layout=layout, model=self.model, average_over=average_over, lockstep=lockstep
        )

    @property
    def draws_as(self) -> int:
        """The first rank of this rank's tensor group.

        The ranks of a group replicate the activations between two sharded layers, so dropout must drop the same elements on each.
        """
        return self.world.rank // self.tensor * self.tensor

    def _plan(self, model: nn.Module) -> Plan:
        plan: Plan | None = self.plan or getattr(model, "tensor_parallel_plan", None)
        if plan is None:
            raise ConfigError(
                f"{type(model).__name__} has no tensor_parallel_plan: give one, strategy.plan={{layer: colwise, next: rowwise}}, "
                "or use model=gpt, model=vit or another strategy"
            )
        return plan


class TensorStep(ShardedStep):
    """Averages gradients once, after the last backward pass, because DDP does not support DTensor parameters.

    average_over: mesh over which gradients are averaged; None if FSDP averages them or there is one data shard.
    lockstep: checks the order of sharded units; None without `shard`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        world: World,
        layout: Layout,
        model: nn.Module,
        average_over: DeviceMesh | None,
        lockstep: Lockstep | None,
    ):
        super().__init__(recipe, world=world, layout=layout, model=model, lockstep=lockstep)
        self._average_over = average_over
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        loss = super().backward(step, batches)
        if self._average_over:
            complete(self._trained, self.world, names=[*self._trained])
            average((p.grad for p in self.parameters if p.grad is not None), group=self._average_over.get_group())
        return loss


def divided_layers(model: nn.Module, plan: Plan, *, ranks: int) -> dict[str, str]:
    """Layer name -> style, for each layer that matches a pattern of the plan.

    Raises ConfigError: a pattern matches no layer, or a layer that cannot be sharded over `ranks`.
    """
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    patterns = [re.sub(r"\d+(?=\.)", "*", name) for name in linear]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        named = [name for name in linear if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(
                f"strategy.plan names {pattern}, and the model has no nn.Linear of that name; {nearest(pattern, patterns)}"
            )
        styles |= dict.fromkeys(named, style)
    for name, style in styles.items():
        _check_divisible(name, style, modules, ranks)
    return styles


def _check_divisible(name: str, style: str, modules: dict[str, nn.Module], ranks: int) -> None:
    layer, parent = modules[name], modules[name.rpartition(".")[0]]
    assert isinstance(layer, nn.Linear)
    features = "out_features" if style == "colwise" else "in_features"
    heads = getattr(parent, "num_heads", ranks)
    if isinstance(parent, nn.MultiheadAttention):
        raise ConfigError(
            f"strategy.plan names {name} of a MultiheadAttention, which cannot be divided: see train/models/attention.py"
        )
    for what, size in ((f"{name}.{features}", getattr(layer, features)), (f"num_heads of {name}", heads)):
        if size % ranks:
            valid = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ConfigError(f"strategy.tensor={ranks} must divide {what}={size}: use one of {valid}")
    users = [other for other, module in modules.items() for p in module.parameters(recurse=False) if p is layer.weight]
    if len(users) > 1:
        raise ConfigError(
            f"strategy.plan names {name}, whose weight is that of {' and '.join(users)} as well: leave it out"
        )


def _shard(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard parameters, gradients and optimizer state over `mesh`, gathered block by block; returns the blocks."""
    units = units_of(model)
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh)
    return units
