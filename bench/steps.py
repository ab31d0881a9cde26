"""Optimizer steps of a strategy without a run around them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from muster.data.loader import batches
from muster.sample_plan import Plan
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.data.batches import loader_config
from muster.train.data.load import load
from muster.train.numerics import seed_all, set_numerics
from muster.train.settings import group_options
from muster.train.strategies.base import StepResult, Strategy
from muster.train.strategies.recipe import recipe
from muster.world.environment import Environment
from muster.world.group import World, start

WORKLOAD = (
    "data=synthetic data.image_shape=[1,28,28] model=mlp model.hidden=[1024,1024,1024] batch_size=64 optimizer=adamw"
)


class Steps:
    """The steps of one config, in a process started by torchrun. Collective: every rank must call each method."""

    met: World | None = None

    def __init__(self, *overrides: str, steps: int):
        config = compose([*overrides, f"max_steps={steps}", "log.progress=none"])
        Steps.met = self.world = Steps.met or start(group_options(config), Environment.from_env())
        set_numerics(config)
        data = load(config, self.world)
        plan = Plan(len(data.train), config.batch_size, config.seed)
        self.strategy: Strategy = build(config.strategy)
        self.strategy.check(config, self.world.size)
        self.strategy.build(recipe(config, data, plan, steps, self.world), self.world)
        seed_all(config.seed, self.world.rank, step=0)
        loader = loader_config(config, shard=self.strategy.data_shard, device=self.world.device)
        self._batches = enumerate(batches(data.train, plan, range(steps), loader))

    def __iter__(self) -> Iterator[StepResult]:
        for step, micro_batches in self._batches:
            yield self.strategy.step(step, micro_batches)

    def losses(self) -> list[tuple[float, float]]:
        """Return (loss, gradient norm) of each step."""
        return [(self.world.sum([float(result.loss)])[0], float(result.grad_norm)) for result in self]


def held(strategy: Any) -> dict[str, int]:
    """Return the bytes of parameters and of optimizer state on this rank."""
    step = strategy.optimizer_step
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    return {"parameters": size_of(step.parameters), "optimizer": size_of(state)}


def size_of(values: Iterable[Any]) -> int:
    """Return the bytes of this rank's part of the tensors among `values`."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def overrides(strategy: str) -> list[str]:
    """Return the overrides for `hybrid,shard=2`; an option that begins with / is a key of the whole config."""
    name, *options = re.split(r",(?=/?[\w.]+=)", strategy)
    keys = [option[1:] if option.startswith("/") else f"strategy.{option}" for option in options]
    return [f"strategy={name}", *keys]


def launch(nproc: int, module: str, *arguments: str) -> Any:
    """Run `module` in `nproc` processes; return the last line that rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).resolve().parent.parent)
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        done = subprocess.run(
            [*line, "-m", module, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])
