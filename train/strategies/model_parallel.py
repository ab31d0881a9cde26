"""DDP around a model that one process splits over two devices, by layer names.

One of the two devices always waits for the other. Use it for a model that fits into two devices but not into one;
strategies that split the model more finely keep all devices busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from muster.data.generators import key_of
from muster.errors import ConfigError, nearest
from muster.train.config.constraints import FREE, LOCAL
from muster.train.config.keys import Backend, Config, Device
from muster.train.strategies.base import Recipe
from muster.train.strategies.replicas.replicated import Replicas
from muster.train.strategies.step.optimizer_step import build_model
from muster.world.environment import Environment
from muster.world.group import World


class ModelParallel(Replicas):
    """Two devices per process: with n processes on a host, local rank i uses entries i and n + i of `gpus` (None: all GPUs).

    split: names of the layers on the second device.
    """

    honours = Replicas.honours - {"compile"}

    def __init__(self, *, split: list[str], gpus: Annotated[list[int] | None, FREE, LOCAL]):
        self.split, self.gpus = split, gpus

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if config.compile:
            raise ConfigError(
                "strategy=model_parallel moves tensors between layers: use compile=false, or strategy=ddp"
            )
        there, processes = len(self._gpus()), Environment.from_env().local_world_size
        if config.device is not Device.cpu and 0 < there < 2 * processes:
            raise ConfigError(
                f"strategy=model_parallel takes two GPUs a process, and {processes} processes have {there}: "
                f"use --nproc-per-node={max(1, there // 2)}, or device=cpu"
            )
        if config.device is not Device.cpu and there and world_size > 1 and config.dist.backend is not Backend.gloo:
            raise ConfigError(
                "strategy=model_parallel with several processes cannot use NCCL, whose communicator is of one device per "
                "process: write dist.backend=gloo, or use strategy=pipeline or fsdp"
            )

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, torch.device("cpu"))  # it may not fit into one device
        spread(self.model, self.split, first=world.device, second=self._second())
        self.wrap(recipe)

    def device_ids(self) -> None:
        """None, as the layers move their inputs themselves."""
        return None

    def seed(self, step: int) -> None:
        super().seed(step)
        recipe = self.optimizer_step.recipe
        if self.world.device.type == "cuda" and not recipe.slices:
            key = key_of("second device", recipe.seed, step, self.world.rank)
            torch.cuda.default_generators[self._second().index].manual_seed(key)

    def _second(self) -> torch.device:
        environment = self.world.environment
        if self.world.device.type != "cuda":
            return self.world.device
        return torch.device("cuda", self._gpus()[environment.local_world_size + environment.local_rank])

    def _gpus(self) -> list[int]:
        return self.gpus or list(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))


def spread(model: nn.Module, split: list[str], *, first: torch.device, second: torch.device) -> None:
    """Move the layers in `split` to the `second` device and the rest to the `first`; hooks move inputs to their layers.

    Raises ConfigError: `split` is empty, names an unknown layer, or separates layers that share a weight.
    """
    check_names(model, split)
    check_shared(model, split)
    kept: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        lay(module, second if _is_within(name, split) else first, kept)
    for name, module in stages(model, split):
        move = partial(_take_along, second if _is_within(name, split) else first)
        module.register_forward_pre_hook(move, with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: _moved(output, first))


def lay(module: nn.Module, device: torch.device, kept: dict[nn.Parameter, nn.Parameter]) -> None:
    """Move the module's own parameters and buffers to `device`; `kept` maps those moved so far, which may be shared."""
    for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
        if parameter.device != device:
            setattr(module, name, kept.setdefault(parameter, _on(parameter, device)))
    for name, buffer in [*module.named_buffers(recurse=False)]:
        setattr(module, name, buffer.to(device))


def stages(module: nn.Module, split: list[str], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest layers that are on one device and are called, as (name, module)."""
    is_cut = any(each.startswith(f"{name}." if name else "") and each != name for each in split)
    if is_cut or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child, layer in module.named_children():
            yield from stages(layer, split, f"{name}.{child}" if name else child)
    else:
        yield name, module


def check_names(model: nn.Module, split: list[str]) -> None:
    """Raise ConfigError if `split` is empty or contains a name that is not a layer of the model."""
    layers, children = dict(model.named_modules()), [name for name, _ in model.named_children()]
    if not split:
        raise ConfigError(
            f"strategy.split=[] names no layer of the second device: use some of this model's, {', '.join(children)}, "
            "or of theirs"
        )
    for name in split:
        if name not in layers or not name:
            beside = [other for other in layers if other and other.rpartition(".")[0] == name.rpartition(".")[0]]
            raise ConfigError(f"strategy.split: this model has no layer {name}; {nearest(name, beside or children)}")


def check_shared(model: nn.Module, split: list[str]) -> None:
    """Raise ConfigError for layers that share a weight and are on different devices."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(parameter, name)
        if _is_within(name, split) != _is_within(other, split):
            raise ConfigError(f"strategy.split: {other} and {name} are one weight: put both layers on one device")


def _is_within(name: str, split: list[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in split)


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)


def _take_along(device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _moved((args, kwargs), device)


def _moved(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
