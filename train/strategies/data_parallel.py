"""DataParallel: one process scatters each batch over several devices, replicates the model there and gathers outputs.

The first device gathers the outputs and computes the loss and the optimizer step, and each step copies the full model.
DDP is faster; this strategy exists for comparison.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from muster.errors import ConfigError
from muster.train.config.constraints import FREE, LOCAL, Ge
from muster.train.config.keys import Config, Device
from muster.train.strategies.base import Recipe
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping, build_model
from muster.world.group import World

LOGICAL_DEVICES = 2


class DataParallel(Stepping):
    """torch.nn.DataParallel over the `gpus` (None: all) of one process; on the CPU, the same steps over logical devices.

    devices: their number; None: all of `gpus`, or 2 logical devices on the CPU.
    """

    honours = frozenset({*Stepping.honours, "channels_last"})

    def __init__(self, *, devices: Annotated[int | None, Ge(1), FREE], gpus: Annotated[list[int] | None, FREE, LOCAL]):
        self.devices, self.gpus = devices, gpus

    def check(self, config: Config, world_size: int) -> None:
        if world_size > 1:
            raise ConfigError(
                f"strategy=data_parallel takes one process and was started with {world_size}: use strategy=ddp"
            )
        if config.compile:
            raise ConfigError(
                "strategy=data_parallel copies the model in each step: use compile=false, or strategy=ddp"
            )
        there = len(self._gpus()) if config.device is not Device.cpu else 0
        if there and self.devices and self.devices > there:
            raise ConfigError(f"strategy.devices={self.devices}, and there are {there} GPUs: use {there} at most")

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, world.device)
        self.optimizer_step = OptimizerStep(
            recipe, world=world, layout=self.layout(world.size), model=self.model, forward=self._forward()
        )

    def _forward(self) -> nn.Module:
        if self.world.device.type == "cuda":
            return nn.DataParallel(self.model, device_ids=self._gpus()[: self.devices])
        return LogicalDevices(self.model, self.devices or LOGICAL_DEVICES)

    def _gpus(self) -> list[int]:
        return self.gpus or list(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))


class LogicalDevices(nn.Module):
    """The steps of torch.nn.DataParallel for the CPU, which it does not support: `number` parts of the batch run in sequence."""

    def __init__(self, module: nn.Module, number: int):
        super().__init__()
        self.module, self.number = module, number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = scatter((args, kwargs), self.number)
        replicas = [replicate(self.module) if index else {} for index in range(len(parts))]  # part 0 uses the model
        outputs = [functional_call(self.module, state, *part) for state, part in zip(replicas, parts, strict=True)]
        return gather(outputs)


def scatter(inputs: Any, number: int) -> list[Any]:
    """Split each tensor of `inputs` along dimension 0 into at most `number` parts, fewer if there are fewer samples."""
    leaves, structure = pytree.tree_flatten(inputs)
    pieces = [leaf.chunk(number) for leaf in leaves]
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*pieces, strict=True)]


def replicate(module: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters and buffers. Gradients flow back through the copies; changes to copied buffers are lost."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return {name: parameter.clone() for name, parameter in module.named_parameters()} | buffers


def gather(outputs: list[Any]) -> Any:
    return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)
