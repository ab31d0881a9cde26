"""One process."""

from __future__ import annotations

from train.config.keys import Config
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe
from train.strategies.optimizer_step import Stepping, build_model
from train.strategies.slices import optimizer_step


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
        self.optimizer_step = optimizer_step(recipe, world=world, layout=self.layout(world.size), model=self.model)
