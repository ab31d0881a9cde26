"""`muster evaluate RUN`: evaluate a run's model from any checkpoint, on any split and any number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from muster.checkpoint.backends.base import STEP, name
from muster.checkpoint.records import read_best
from muster.checkpoint.storage import Saved, Storage
from muster.checkpoint.weights import Evaluated, lists_beside, read_evaluated, read_weights
from muster.dist.world import World
from muster.errors import ConfigError, MusterError, say
from muster.faults import output
from muster.faults.preemption import Preemption
from muster.job.exit import tell
from muster.job.lifecycle import Ending, Lifecycle, Peers
from muster.plan import Plan
from muster.redact import redacted
from muster.train.config.command_line import readable
from muster.train.config.compose import of_run
from muster.train.config.keys import Config
from muster.train.config.options import values
from muster.train.config.parts import Part
from muster.train.data.load import load
from muster.train.evaluation import measure
from muster.train.models.prepare import take
from muster.train.numerics import set_numerics
from muster.train.objectives.build import build_measures
from muster.train.run import join
from muster.train.strategies.base import Recipe, Strategy
from muster.train.strategies.recipe import recipe
from muster.train.strategies.replicas.buffers import Buffers


class Print:
    """Prints values to standard output, one per line or as JSON."""

    def __init__(self, *, as_json: bool):
        self.as_json = as_json

    def __call__(self, facts: dict[str, Any], values: dict[str, float]) -> None:
        """Print the `values` of an evaluation, and the `facts` about it."""
        if self.as_json:
            print(json.dumps({**facts, **values}), flush=True)
        else:
            header = "  ".join(f"{name}={value}" for name, value in facts.items())
            print(header, *(f"{name} {value:.6g}" for name, value in values.items()), sep="\n", flush=True)


def attempt(config: Config, preemption: Preemption, source: Source, *, split: str, as_json: bool) -> int:
    """Evaluate with the other ranks and return the exit code. Writes nothing to the run's folder."""
    with Lifecycle(Path(config.output_dir), preemption, records=False) as life:
        world, strategy = join(config, preemption)
        life.meet(world, timeout_s=config.dist.timeout_s)
        peers = life.run()
        show = Print(as_json=as_json) if world.is_first else None
        ending = carry_out(config, peers, strategy, source, split=split, show=show)
        life.on_end(strategy.close)
        life.end(ending)
    return life.exit_code


def carry_out(
    config: Config, peers: Peers, strategy: Strategy, source: Source, *, split: str, show: Print | None
) -> Ending:
    """Print the metrics of `source`'s weights on `split`. Collective: every rank must call it. Raises MusterError."""
    world = peers.world
    set_numerics(config)
    data = load(config, world)
    test = data.train if split == "train" else data.test
    if test is None:
        raise ConfigError(f"data._target_={config.data.target} has no test split: give --split train")
    plan = Plan(len(data.train), config.batch_size, config.seed)
    measures = build_measures(config.metrics, world=world)
    parts = recipe(config, data, plan, 1, world, measures=measures)
    strategy.build(replace(parts, build_model=lambda: restored(parts, source, world)), world)
    values = measure(config, test, strategy, world, measures, begin=lambda: peers.begin("evaluation", 0))
    if values is None:
        return Ending(preempted="stopped during an evaluation: run the same command again")
    if show:
        show({"weights": str(source), "split": split, "samples": len(test), "world_size": world.size}, values)
    return Ending()


def restored(recipe: Recipe, source: Source, world: World) -> nn.Module:
    """Build the model of `recipe`; load it and the objective from `source`. Raises MusterError."""
    model, objective = recipe.build_model(), recipe.objective
    buffers = Buffers(model, world, objective=objective if isinstance(objective, nn.Module) else None)
    found = source.read(buffers, says=world.is_first)
    take(model, found.weights, None)
    buffers.put(found.beside)
    return model


class Source:
    """The weights of a run to evaluate: its `model.pt` (`saved` is None), or a checkpoint. Raises ConfigError."""

    def __init__(self, run: Path, checkpoint: str | None, *, storage: str | None = None):
        self.run, self._place = run, storage or str(run / "checkpoints")
        self.saved: Saved | None = None
        if checkpoint or not (run / "model.pt").exists():
            self.saved = self._find(checkpoint or "newest")

    @cached_property
    def storage(self) -> Storage:
        """The storage of the run's checkpoints. Some storage is remote, so it is opened only when it is used."""
        return Storage(self._place)

    def __str__(self) -> str:
        return self.saved.path if self.saved else str(self.run)

    def read(self, buffers: Buffers, *, says: bool) -> Evaluated:
        """Read the weights and buffers that the run evaluated with.

        If `model.pt` lacks some of `buffers` and the newest checkpoint has them, the checkpoint is read instead. If no
        checkpoint can be read, a rank with `says` prints that these buffers keep their initial values.

        Raises:
            MusterError: the weights cannot be read.
        """
        if self.saved:
            return read_evaluated(self.saved)
        weights = read_weights(str(self.run))
        lacking = buffers.names - weights.keys()
        with contextlib.suppress(MusterError):  # a finished run's checkpoints may be gone
            newest = self._find("newest") if lacking else None
            if newest and lists_beside(newest, lacking):
                self.saved = newest
                return read_evaluated(newest)
            lacking = lacking if not newest else set()
        if here := sorted(lacking & buffers.own.keys()):
            more = f" and {len(here) - 1} more" if here[1:] else ""
            if says:
                say(
                    f"muster: model.pt has no {here[0]}{more}, because a state dict leaves such buffers out, and no checkpoint "
                    f"in {redacted(self._place)} can be read: the evaluation uses their initial values"
                )
        return Evaluated(weights, {})

    def _find(self, checkpoint: str) -> Saved:
        steps = self.storage.steps()
        if checkpoint == "newest":
            step = steps[0] if steps else -1
        elif checkpoint == "best":
            step = self._best()
        else:
            digits = match[1] if (match := STEP.fullmatch(checkpoint)) else checkpoint
            step = int(digits) if digits.isdecimal() else -1
        if step in steps:
            return Saved(self.storage, self.storage.manifest(step))
        there = ", ".join(name(step) for step in reversed(steps)) or "none"
        raise ConfigError(
            f"--checkpoint {checkpoint} is not in {self.storage.root}: use newest, best or one of its steps: {there}"
        )

    def _best(self) -> int:
        if best := read_best(self.run):
            return best.step
        raise ConfigError(
            f"{self.run} has no readable best.json: train with checkpoint.best=accuracy, or give --checkpoint STEP"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="muster evaluate", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--checkpoint", help="a step, newest or best (default: model.pt, else the newest checkpoint)")
    parser.add_argument("--split", choices=["test", "train"], default="test")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given, overrides = parser.parse_known_args()
    output.endure()
    preemption, code = Preemption(), 0
    preemption.install()
    try:
        config = of_run(given.run, overrides)
        keys = [each.key_or_group for each in readable(overrides)]
        if not any(key.startswith("strategy.") for key in keys):  # ddp loads the weights of any strategy
            options = values("strategy", "ddp")
            config = replace(config, strategy=Part.of("strategy", options))
        evaluates = replace(config.eval, every_steps=None)
        config = replace(config, virtual_world_size=None, callbacks={}, freeze=[], eval=evaluates)
        source = Source(given.run, given.checkpoint, storage=config.checkpoint.storage)
        code = attempt(config, preemption, source, split=given.split, as_json=given.json)
    except MusterError as error:
        tell(error)
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # no teardown, as in python -m train


if __name__ == "__main__":
    main()
