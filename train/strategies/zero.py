"""ZeRO stage 1: DDP whose optimizer state is divided among the ranks, a whole parameter at a time.

Every rank steps the parameters that are its own and broadcasts them: the weights are those of DDP, bit for bit.

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

from train.checkpoint.trained import SavedTensor
from train.dist.world import World
from train.strategies.base import BuildOptimizer, Recipe
from train.strategies.common.replicas import ConfiguredReplicas


class Zero(ConfiguredReplicas):
    """DDP with the optimizer's state divided; with one rank, plain training."""

    def build(self, recipe: Recipe, world: World) -> None:
        if world.size > 1:
            recipe = replace(recipe, build_optimizer=partial(divided, recipe.build_optimizer))
        super().build(recipe, world)

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Of the optimizer's values only those of this rank's own parameters."""
        optimizer = self.optimizer_step.optimizer
        if isinstance(optimizer, DividedOptimizer):
            own = optimizer.own()
            others = {f"optimizer/{name}" for name, each in self.model.named_parameters() if each not in own}
            saved = {name: facts for name, facts in saved.items() if name.rpartition("/")[0] not in others}
        return super().targets(saved)


class DividedOptimizer(ZeroRedundancyOptimizer):
    """`whole`, of which this rank keeps and steps its part. `state` is that part's, `param_groups` are all. Collective."""

    def __init__(self, whole: torch.optim.Optimizer):
        self._whole = whole
        super().__init__([{**group} for group in whole.param_groups], optimizer_class=cast(Any, self._part))
        self.state = self.optim.state

    def own(self) -> set[Tensor]:
        """The parameters that this rank steps."""
        return {parameter for group in self.optim.param_groups for parameter in group["params"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` has of this rank's part; torch's own would leave fused steps on the host."""
        parameters, own = [parameter for group in self.param_groups for parameter in group["params"]], self.own()
        state = state_dict["state"]  # by index, and by names what is kept for no parameter
        kept = {key: value for key, value in state.items() if isinstance(key, str) or parameters[key] in own}
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": kept})
        self.optim.state = self.state

    def _part(self, groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        """The optimizer that the config has built, left with the parameters of this rank; it may be left with none."""
        for group, mine in zip(self._whole.param_groups, groups, strict=True):
            group["params"] = mine["params"]
        kept = {parameter for group in groups for parameter in group["params"]}
        for parameter in self._whole.state.keys() - kept:
            del self._whole.state[parameter]
        return self._whole


def divided(build: BuildOptimizer, named: Iterable[tuple[str, nn.Parameter]], **options: Any) -> torch.optim.Optimizer:
    """What `build` makes of these parameters, divided among the ranks. Collective."""
    return DividedOptimizer(build(named, **options))
