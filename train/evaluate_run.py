"""Evaluate a run's model from any checkpoint, on any split and any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from muster.attempt.lifecycle import Ending, Lifecycle, Peers
from muster.errors import ConfigError
from muster.faults.preemption import Preemption
from muster.sample_plan import Plan
from muster.train.config.choices import values
from muster.train.config.command_line import readable
from muster.train.config.compose import of_run
from muster.train.config.keys import Config
from muster.train.config.parts import Part
from muster.train.data.load import load
from muster.train.evaluation import measure, samples_of
from muster.train.numerics import set_numerics
from muster.train.objectives.build import build_measures
from muster.train.progress import steps_asked_for
from muster.train.run import join
from muster.train.saved_weights import Source, chosen_run, config_of, is_of_job
from muster.train.strategies.base import Recipe, Strategy
from muster.train.strategies.recipe import recipe
from muster.world.group import World


class Print:
    def __init__(self, *, as_json: bool):
        self.as_json = as_json

    def __call__(self, facts: dict[str, Any], values: dict[str, float]) -> None:
        if self.as_json:
            print(json.dumps({**facts, **values}), flush=True)
        else:
            header = "  ".join(f"{name}={value}" for name, value in facts.items())
            print(header, *(f"{name} {value:.6g}" for name, value in values.items()), sep="\n", flush=True)


def evaluate(
    folder: Path,
    overrides: list[str],
    preemption: Preemption,
    *,
    checkpoint: str | None = None,
    split: str = "test",
    as_json: bool = False,
) -> int:
    """Evaluate the run in `folder`, or the best run of a sweep's folder, and return the exit code.

    `checkpoint`: a step, `newest` or `best`; None: `model.pt` if the run is done, else the newest checkpoint.
    Raises MusterError: there is no such run or checkpoint, or the overrides are invalid.
    """
    run, checkpoint = chosen_run(folder, checkpoint)
    if is_of_job(config_of(run)):
        raise ConfigError(
            f"{run} is a run of muster.Job, whose model and data are its own script's: evaluate there by job.evaluate(), or "
            f"load the weights, muster.load({str(run)!r}, into=model)"
        )
    config = of_run(run, overrides)
    keys = [each.key_or_group for each in readable(overrides)]
    if not any(key.startswith("strategy.") for key in keys):  # ddp loads the weights of any strategy
        config = replace(config, strategy=Part.of("strategy", values("strategy", "ddp")))
    evaluates = replace(config.eval, every_steps=None)
    source = Source(run, checkpoint, storage=config.checkpoint.storage)
    trained_in = max(source.world_size, config.virtual_world_size or 1)
    config = replace(config, virtual_world_size=None, callbacks={}, freeze=[], eval=evaluates)
    return attempt(config, preemption, source, split=split, as_json=as_json, trained_in=trained_in)


def attempt(
    config: Config, preemption: Preemption, source: Source, *, split: str, as_json: bool, trained_in: int
) -> int:
    """Evaluate with the other ranks and return the exit code. Writes nothing to the run's folder.

    `trained_in`: the ranks or slices over which training divided its batches.
    """
    with Lifecycle(Path(config.output_dir), preemption, records=False) as life:
        world, strategy = join(config, preemption)
        life.meet(world, timeout_s=config.dist.timeout_s)
        peers = life.run()
        show = Print(as_json=as_json) if world.is_first else None
        ending = carry_out(config, peers, strategy, source, split=split, show=show, trained_in=trained_in)
        life.on_end(strategy.close)
        life.end(ending)
    return life.exit_code


def carry_out(
    config: Config,
    peers: Peers,
    strategy: Strategy,
    source: Source,
    *,
    split: str,
    show: Print | None,
    trained_in: int,
) -> Ending:
    """Print the metrics of `source`'s weights on `split`. Collective. Raises MusterError."""
    world = peers.world
    set_numerics(config)
    data = load(config, world)
    test = data.train if split == "train" else data.test
    if test is None:
        raise ConfigError(f"data._target_={config.data.target} has no test split: give --split train")
    plan = Plan(len(data.train), config.batch_size, config.seed)
    measures = build_measures(config.metrics, world=world)
    parts = recipe(config, data, plan, steps_asked_for(config, plan), world, measures=measures)
    strategy.build(replace(parts, build_model=lambda: restored(parts, source, world)), world)
    begin = partial(peers.begin, "evaluation", 0)
    values = measure(config, test, strategy, world, measures, begin=begin, trained_in=trained_in)
    if values is None:
        return Ending(preempted="stopped during an evaluation: run the same command again")
    if show:
        show(
            {"weights": str(source), "split": split, "samples": samples_of(config, test), "world_size": world.size},
            values,
        )
    return Ending()


def restored(recipe: Recipe, source: Source, world: World) -> nn.Module:
    """Build the model of `recipe`; load it and the objective from `source`. Raises MusterError."""
    model, objective = recipe.build_model(), recipe.objective
    source.fill(model, world, objective=objective if isinstance(objective, nn.Module) else None)
    return model
