"""One process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, SavedTensor, StepResult, Strategy
from train.strategies.optimizer_step import OptimizerStep, build_model


class Single(Strategy):
    """Train in one process. Raises ConfigError if there are more."""

    def __init__(self, *, world: World):
        if world.size > 1:
            raise ConfigError(f"strategy=single takes one process and was started with {world.size}: use strategy=ddp")
        self.world = world

    @property
    def lr(self) -> float:
        return self.optimizer_step.lr

    def build(self, recipe: Recipe) -> None:
        self.model = build_model(recipe, self.world.device)
        if recipe.compile:
            self.model.compile()
        self.optimizer_step = OptimizerStep(recipe, world=self.world, model=self.model)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        return self.optimizer_step.step(step, batches)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return self.optimizer_step.evaluate(batch)

    def is_finite(self) -> bool:
        return self.optimizer_step.is_finite()

    def sync_parameters(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return self.optimizer_step.state()

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return self.optimizer_step.targets(saved)

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer_step.load(state)

    def weights(self) -> dict[str, Tensor]:
        return self.optimizer_step.weights()
