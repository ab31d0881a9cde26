"""ZeRO stage 1: DDP whose optimizer state is divided among the ranks, a whole parameter at a time.

Every rank steps the parameters that are its own and broadcasts them: the weights are those of DDP, bit for bit.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from train.dist.world import World
from train.strategies.base import Recipe, SavedTensor
from train.strategies.ddp import Ddp


class Zero(Ddp):
    """DDP with the optimizer's state divided; with one rank, plain training."""

    def build(self, recipe: Recipe, world: World) -> None:
        if world.size > 1:
            recipe = replace(recipe, build_optimizer=partial(divided, recipe.build_optimizer))
        super().build(recipe, world)

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return super().targets({name: facts for name, facts in saved.items() if self._is_kept(name)})

    def _is_kept(self, name: str) -> bool:
        """Whether this rank has what is saved under `name`: of the optimizer's values those of its own parameters."""
        kind, _, rest = name.partition("/")
        optimizer = self.optimizer_step.optimizer
        if kind != "optimizer" or not isinstance(optimizer, DividedOptimizer):
            return True
        parameter = dict(self.model.named_parameters()).get(rest.rpartition("/")[0])
        return parameter is None or optimizer.owns(parameter)


class DividedOptimizer(ZeroRedundancyOptimizer):
    """`whole`, of which this rank keeps and steps its part. `state` is that part's, `param_groups` are all. Collective."""

    def __init__(self, whole: torch.optim.Optimizer):
        self._whole = whole
        super().__init__([{**group} for group in whole.param_groups], optimizer_class=cast(Any, self._part))
        self.state = self.optim.state

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank steps `parameter`."""
        return any(parameter is each for group in self.optim.param_groups for each in group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` has of this rank's part; torch's own would leave fused steps on the host."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = {index: values for index, values in state_dict["state"].items() if self.owns(parameters[index])}
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": own})
        self.optim.state = self.state

    def _part(self, groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        """The optimizer that the config has built, left with the parameters of this rank; it may be left with none."""
        for group, mine in zip(self._whole.param_groups, groups, strict=True):
            group["params"] = mine["params"]
        kept = {parameter for group in groups for parameter in group["params"]}
        for parameter in self._whole.state.keys() - kept:
            del self._whole.state[parameter]
        return self._whole


def divided(
    build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """What `build` makes of `parameters`, divided among the ranks. Collective."""
    return DividedOptimizer(build(parameters))
