"""Fully sharded data parallelism: each rank holds a shard of each parameter, its gradient and its optimizer state.

A unit's parameters are all-gathered just before it computes and freed after it; gradients are reduce-scattered.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import FREE, Ge
from muster.train.config.keys import Config, Device, Precision
from muster.train.optim.meshes import step_by_mesh
from muster.train.strategies.base import Recipe
from muster.train.strategies.partition.collective_order import END, Lockstep
from muster.train.strategies.partition.deferred_init import FirstBuilds
from muster.train.strategies.step.gradient import refuse_hooks, refuse_sparse
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping
from muster.world.group import World

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(kw_only=True, eq=False)
class Fsdp(Stepping):
    """FSDP over all ranks, with the same arithmetic on one rank.

    Args:
        units: patterns of names or classes of the modules that are gathered one at a time; None: see `units_of`.
        param_dtype: dtype for all-gathers and computation in units; shards stay in fp32.
        reduce_dtype: dtype in which gradients are reduced over the ranks; None: fp32.
        reshard_after_forward: free a unit's parameters after forward and gather them again for backward. Those outside of
            units are needed at the end of forward and at the start of backward, so they are kept in between.
        activation_checkpointing: recompute the activations within a unit in backward.
        prefetch: how many units are gathered ahead of the one that computes, in the order of `units`, which is taken for that of
            the model's forward. 0: one, as soon as the code of the unit before it has run.
        cpu_offload: keep shards, gradients and optimizer state in host memory; CUDA only.
    """

    honours = frozenset({*Stepping.honours, "compile"})

    units: Sequence[str] | None
    param_dtype: Literal["bf16"] | None
    reduce_dtype: Literal["bf16"] | None
    reshard_after_forward: Annotated[bool, FREE]
    activation_checkpointing: Annotated[bool, FREE]
    prefetch: Annotated[int, Ge(0), FREE]
    cpu_offload: Annotated[bool, FREE]

    def check(self, config: Config, world_size: int) -> None:
        self.layout(world_size)
        if (chosen := self._dtypes()) and config.precision is Precision.fp16:
            raise ConfigError(
                f"strategy.{chosen[0]}=bf16 cannot be combined with precision=fp16: use precision=fp32 or bf16"
            )
        if config.channels_last:
            raise ConfigError(
                "channels_last=true cannot be combined with sharding, which slices plain tensors: use false"
            )
        if self.cpu_offload and (config.device is Device.cpu or not torch.cuda.is_available()):
            raise ConfigError(
                "strategy.cpu_offload=true needs CUDA devices: on the CPU all state is in host memory already, use false"
            )
        if self.cpu_offload and config.precision is Precision.fp16:
            raise ConfigError(
                "strategy.cpu_offload=true cannot be combined with precision=fp16, whose scaler lives on the device: "
                "use precision=fp32 or bf16"
            )

    def build(self, recipe: Recipe, world: World) -> None:
        """Build the model on rank 0's host, shard its units and then the rest. Raises ConfigError: it cannot be sharded as configured."""
        first = FirstBuilds(recipe.build_model, world)  # on the host: no device ever holds the full model
        self.world, self.model = world, first.model
        refuse_sparse(self.model, "a strategy that shards")
        refuse_hooks(self.model, "a strategy that shards")
        units = named_units(self.model, self.units) if self.units else units_of(self.model)
        if self.param_dtype and any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            raise ConfigError(
                "strategy.param_dtype=bf16 cannot be combined with batch norm: use precision=bf16 in its place"
            )
        self._refuse_model(units)
        layout = self.layout(world.size)
        options: dict[str, Any] = {
            "mesh": layout.mesh(world.device.type),
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        policy = MixedPrecisionPolicy()
        if self._dtypes():
            reduced = torch.bfloat16 if self.reduce_dtype else torch.float32
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.param_dtype else None, reduce_dtype=reduced
            )
        for unit in units:
            first.fill(unit)
            if self.activation_checkpointing:
                unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
            if recipe.compile:
                unit.compile()
            fully_shard(unit, mp_policy=policy, **options)
        first.fill(self.model)
        whole = replace(policy, output_dtype=torch.float32) if self.param_dtype else policy  # fp32 outputs for the loss
        options["reshard_after_forward"] = None if self.reshard_after_forward else False  # None: all units but the root
        self.sharded = fully_shard(self.model, mp_policy=whole, **options)
        ahead = [each for each in self.model.modules() if each in units]  # `units` may have inner ones first
        for each, order in (("forward", ahead), ("backward", ahead[::-1])) if self.prefetch else ():
            for number, unit in enumerate(order):
                getattr(unit, f"set_modules_to_{each}_prefetch")(order[number + 1 : number + 1 + self.prefetch])
        shards = [*layout.sizes.values()][-1]
        lockstep = Lockstep(self.model, units, world, shards=shards) if world.size > 1 else None
        self.optimizer_step = ShardedStep(
            recipe, world=world, layout=layout, model=self.model, no_sync=self._no_sync, lockstep=lockstep
        )

    def _dtypes(self) -> list[str]:
        return [name for name in ("param_dtype", "reduce_dtype") if getattr(self, name)]

    def _refuse_model(self, units: Sequence[nn.Module]) -> None:
        name = type(self).__name__.lower()
        for unit in units if self.activation_checkpointing else ():
            if any(isinstance(module, _BatchNorm) for module in unit.modules()):
                raise ConfigError(
                    "strategy.activation_checkpointing=true computes batch norm twice, and counts its statistics twice: "
                    "use false, or name units without batch norm in strategy.units"
                )
        for parameter_name, parameter in self.model.named_parameters():
            if not parameter.dim():
                raise ConfigError(
                    f"strategy={name} cannot cut {parameter_name}, which is a scalar: give it shape [1], or use strategy=ddp"
                )
        seen: set[nn.Parameter] = set()
        for unit in (*units, self.model):
            mine = {p for p in unit.parameters() if p not in seen and p.requires_grad}
            seen |= mine
            if len(kinds := {str(p.dtype).removeprefix("torch.") for p in mine}) > 1:
                raise ConfigError(
                    f"strategy={name} gathers the parameters of a unit together, and {type(unit).__name__} has {' and '.join(sorted(kinds))}: "
                    "give them one type, name units of one type each in strategy.units, or use strategy=ddp"
                )

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self.sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.sharded.set_requires_gradient_sync(True)


class ShardedStep(OptimizerStep):
    """OptimizerStep for sharded units. A `lockstep` raises ConfigError in a step or evaluation if ranks call different units."""

    def __init__(self, *args: Any, lockstep: Lockstep | None, **options: Any):
        super().__init__(*args, **options)
        self._lockstep = lockstep
        step_by_mesh(self.optimizer)

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        if self._lockstep:
            self._lockstep.begin()
        loss = super().backward(step, batches)
        if self._lockstep:
            self._lockstep.reduced()
        return loss

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        measured = super().evaluate(batch)
        self._reshard()
        if self._lockstep:
            self._lockstep.agree(END)
        return measured

    def _reshard(self) -> None:
        """Free the parameters outside of units: no backward pass does it after an evaluation."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


def units_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the model's Sequentials, ModuleLists and ModuleDicts (layers, residual or transformer blocks), outermost only.

    A module that shares a parameter with a module outside it is left out.
    """
    return [unit for unit in _elements(model) if not _shares(unit, model)]


def named_units(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose name or class name matches a pattern, innermost first.

    Raises ConfigError if a pattern matches no module, or a match shares a parameter with a module outside it.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(_matches(pattern, name, module) for name, module in modules.items()):
            known = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
            raise ConfigError(f"strategy.units: no module is or is called {pattern}; this model's classes are {known}")
    named = {name: module for name, module in modules.items() if any(_matches(each, name, module) for each in patterns)}
    for name, module in named.items():
        if _shares(module, model):
            raise ConfigError(f"strategy.units: {name} shares a parameter with a module outside of it: leave it out")
    return list(named.values())[::-1]


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if (
            isinstance(module, CONTAINERS)
            and type(child) not in CONTAINERS
            and next(child.parameters(), None) is not None
        ):
            yield child
        else:
            yield from _elements(child)


def _shares(unit: nn.Module, model: nn.Module) -> bool:
    inside, own = set(unit.modules()), set(unit.parameters())
    return any(own.intersection(module.parameters(recurse=False)) for module in model.modules() if module not in inside)
