"""ZeRO stage 1: DDP with the optimizer state partitioned over the ranks, by whole parameters.

Each rank updates its own parameters and broadcasts them. The weights are bit for bit those of DDP.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from muster.checkpoint.trained import SavedTensor
from muster.train.strategies.base import BuildOptimizer, Recipe
from muster.train.strategies.replicas.replicated import ConfiguredReplicas
from muster.world.group import World


class Zero(ConfiguredReplicas):
    honours = ConfiguredReplicas.honours

    def build(self, recipe: Recipe, world: World) -> None:
        if world.size > 1:
            recipe = replace(recipe, build_optimizer=partial(divided, recipe.build_optimizer))
        super().build(recipe, world)

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Optimizer state only for the parameters that this rank updates."""
        optimizer = self.optimizer_step.optimizer
        if isinstance(optimizer, DividedOptimizer):
            own = optimizer.own()
            others = {f"optimizer/{name}" for name, each in self.model.named_parameters() if each not in own}
            saved = {name: facts for name, facts in saved.items() if name.rpartition("/")[0] not in others}
        return super().targets(saved)


class DividedOptimizer(ZeroRedundancyOptimizer):
    """Partitions the optimizer `whole` over the ranks; each rank keeps and steps its own part.

    `state` covers this rank's part only, `param_groups` cover all parameters. Collective.
    """

    def __init__(self, whole: torch.optim.Optimizer):
        self._whole = whole
        super().__init__([{**group} for group in whole.param_groups], optimizer_class=cast(Any, self._part))
        self.state = self.optim.state

    def own(self) -> set[Tensor]:
        """The parameters that this rank updates."""
        return {parameter for group in self.optim.param_groups for parameter in group["params"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part. torch's ZeroRedundancyOptimizer would leave the `step` tensors of fused optimizers on the host."""
        parameters, own = [parameter for group in self.param_groups for parameter in group["params"]], self.own()
        state = state_dict["state"]  # keys: parameter indices, and names for state that belongs to no parameter
        kept = {key: value for key, value in state.items() if isinstance(key, str) or parameters[key] in own}
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": kept})
        self.optim.state = self.state

    def _part(self, groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        """The configured optimizer, reduced to this rank's parameters, possibly none."""
        for group, mine in zip(self._whole.param_groups, groups, strict=True):
            group["params"] = mine["params"]
        kept = {parameter for group in groups for parameter in group["params"]}
        for parameter in self._whole.state.keys() - kept:
            del self._whole.state[parameter]
        return self._whole


def divided(build: BuildOptimizer, named: Iterable[tuple[str, nn.Parameter]], **options: Any) -> torch.optim.Optimizer:
    """Build the optimizer over the `named` parameters and partition it over the ranks. Collective."""
    return DividedOptimizer(build(named, **options))
