"""Optimizer steps without a run around them: several strategies in one world, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from muster.data.loader import batches
from muster.sample_plan import Plan
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.data.batches import loader_config
from muster.train.data.load import load
from muster.train.numerics import set_numerics
from muster.train.settings import group_options
from muster.train.strategies.base import SavedTensor, StepResult, Strategy
from muster.train.strategies.recipe import recipe
from muster.world.environment import Environment
from muster.world.group import World
from muster.world.group import start as start_world

STEPS = 100


class Trained:
    """A configured strategy that trains step by step. Losses are those of the whole world."""

    def __init__(self, world: World, *overrides: str):
        config = compose([*overrides])
        set_numerics(config)
        self.world, self.strategy, self.losses = world, build(config.strategy), list[float]()
        self.strategy.check(config, world.size)
        data = load(config, world)
        self.plan = Plan(len(data.train), config.batch_size, config.seed)
        made = recipe(config, data, self.plan, STEPS, world)
        self.strategy.build(made, world)
        self.counts, self.data, self.config = self.strategy.counts(made), data, config
        shard = self.strategy.data_shard or (0, 1)  # a server has no samples
        loader = loader_config(config, shard=shard, device=world.device)
        self.batches = lambda steps: batches(data.train, self.plan, steps, loader)

    def steps(self, steps: range, *, alter: Callable[[int, Any], None] = lambda *_: None) -> list[StepResult]:
        """Take `steps`. alter: changes a step's micro-batches first."""
        results = []
        for step, micro_batches in zip(steps, self.batches(steps), strict=True):
            alter(step, micro_batches)
            own = micro_batches if self.strategy.data_shard else []
            weighed = self.counts.weigh(own, alone=self.strategy.is_alone(step))
            results.append(self.strategy.step(step, weighed))
            self.losses += self.world.sum([float(results[-1].loss)])
        return results

    def resume(self, state: dict[str, Any]) -> None:
        """Load this rank's state, as from a checkpoint."""
        load_state(self.strategy, state)

    @property
    def weights(self) -> dict[str, Any]:
        """Return the saved form of the weights as lists. Collective: every rank must call it."""
        return {name: torch.as_tensor(value).tolist() for name, value in self.strategy.weights().items()}


def load_state(strategy: Strategy, state: dict[str, Any]) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    targets = strategy.targets({name: SavedTensor(t.size(), t.dtype) for name, t in tensors.items()})
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    strategy.load({**{name: value for name, value in state.items() if name not in tensors}, **targets})


def world() -> World:
    """Form a process group; return this process's world."""
    return start_world(group_options(compose([])), Environment.from_env())
