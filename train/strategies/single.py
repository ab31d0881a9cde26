"""One process."""

from __future__ import annotations

from typing import Any

from train.config.keys import Config
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe
from train.strategies.optimizer_step import OptimizerStep, Stepping, build_model
from train.strategies.slices import SlicedStep


class Single(Stepping):
    """Train in one process."""

    takes_slices = True

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if world_size > 1:
            raise ConfigError(f"strategy=single takes one process and was started with {world_size}: use strategy=ddp")

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, world.device)
        if recipe.compile:
            self.model.compile()
        parts: dict[str, Any] = {"world": world, "layout": self.layout(world.size), "model": self.model}
        self.optimizer_step = (
            SlicedStep(recipe, slices=recipe.slices, **parts) if recipe.slices else OptimizerStep(recipe, **parts)
        )
