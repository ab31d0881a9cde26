"""`python -m train.evaluate RUN`: measure a run's model again, from any checkpoint, on any split, on any number of ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.callbacks.all import Callbacks
from train.checkpoint.records import read_best
from train.checkpoint.storage import STEP, Storage
from train.checkpoint.weights import read_weights
from train.config.command_line import readable
from train.config.compose import of_run
from train.config.keys import Config
from train.config.options import values
from train.config.parts import Part
from train.data.load import load
from train.dist.world import World
from train.errors import ConfigError, MusterError, Preempted
from train.faults import output
from train.faults.exit import Exit, tell
from train.faults.preemption import Preemption
from train.loggers.base import Logger
from train.loggers.metrics import Metrics
from train.loop import Progress, Run, evaluate
from train.objectives.build import build_measures
from train.plan import Plan
from train.run import beat, join, recipe, set_numerics
from train.strategies.base import Strategy
from train.timing.clock import Clock
from train.window import Window


class Print(Logger):
    """The values, on standard output: a line each, or as JSON."""

    def __init__(self, facts: dict[str, Any], *, as_json: bool):
        self.facts, self.as_json = facts, as_json

    def log(self, record: dict[str, Any]) -> None:
        found = {name: value for name, value in record.items() if name not in ("kind", "step", "epoch")}
        if self.as_json:
            print(json.dumps({**self.facts, **found}), flush=True)
        else:
            facts = "  ".join(f"{name}={value}" for name, value in self.facts.items())
            print(facts, *(f"{name} {value:.6g}" for name, value in found.items()), sep="\n", flush=True)


class Quiet(Exit):
    """An end that leaves the run's folder as it is."""

    def _write(self, record: dict[str, Any], *, first: bool = False) -> None: ...


class Nothing:
    """Saves nothing: there is nothing to resume."""

    def save(self, *, state: dict[str, Any], position: dict[str, Any]) -> None:
        raise Preempted("stopped in the middle of an evaluation: run the same command again")

    def flush(self) -> None: ...


def attempt(config: Config, preemption: Preemption, source: str, *, split: str, as_json: bool) -> int:
    """Measure with the other ranks; the exit code. Nothing of the run is written to."""
    leaving = Quiet(Path(config.output_dir))
    try:
        world, strategy = join(config, preemption)
        measure(config, world, strategy, preemption, leaving, source, split=split, as_json=as_json)
    except BaseException as error:
        return leaving.because(error)
    return 0


def measure(
    config: Config,
    world: World,
    strategy: Strategy,
    preemption: Preemption,
    leaving: Exit,
    source: str,
    *,
    split: str,
    as_json: bool,
) -> None:
    """Print what the weights of `source` give on `split`. Collective. Raises MusterError."""
    leaving.world, leaving.heartbeat = world, beat(config, world, leaving)
    preemption.watch(world)
    set_numerics(config)
    data = load(config, world)
    data = replace(data, test=data.train) if split == "train" else data
    if data.test is None:
        raise ConfigError(f"data._target_={config.data.target} has no test split: give --split train")
    plan = Plan(len(data.train), config.batch_size, config.seed)
    measures = build_measures(config.metrics, world=world)
    parts = recipe(config, data, plan, 1, world, measures=measures, weights=read_weights(source))
    strategy.build(parts, world)
    facts = {"weights": source, "split": split, "samples": len(data.test), "world_size": world.size}
    metrics = Metrics([Print(facts, as_json=as_json)] if world.is_first else [], samples=0)
    evaluate(
        Run(
            config=config, world=world, data=data, plan=plan, strategy=strategy, checkpoints=Nothing(), metrics=metrics,
            preemption=preemption, heartbeat=leaving.heartbeat, total_steps=1, progress=Progress(),
            callbacks=Callbacks({}), measures=measures, clock=Clock(), window=Window(world, slices=None),
        )
    )  # fmt: skip
    preemption.close()
    strategy.close()
    leaving.heartbeat.close()
    world.close()


def source_of(run: Path, checkpoint: str | None, *, storage: str | None = None) -> str:
    """The weights that are meant, of a run whose checkpoints are in `storage`, else in its folder. Raises ConfigError if there are none."""
    if checkpoint is None or checkpoint == "newest":
        return str(run / "checkpoints" if checkpoint else run)
    if checkpoint == "best":
        if not (best := read_best(run)):
            raise ConfigError(
                f"{run} has no best.json that can be read: train with checkpoint.best=accuracy, or give --checkpoint STEP"
            )
        return Storage(storage or str(run / "checkpoints")).path(best.step)
    name = checkpoint if STEP.fullmatch(checkpoint) else f"step-{int(checkpoint):08d}" if checkpoint.isdecimal() else ""
    if not name or not (run / "checkpoints" / name).is_dir():
        there = ", ".join(sorted(path.name for path in (run / "checkpoints").glob("step-*"))) or "none"
        raise ConfigError(f"--checkpoint {checkpoint} is not in {run}; there: {there}; or give newest or best")
    return str(run / "checkpoints" / name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.evaluate", description=__doc__)
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
        if not any(
            each.key_or_group.startswith("strategy.") for each in readable(overrides)
        ):  # it loads what any other has saved
            options = values("strategy", "ddp")
            config = replace(config, strategy=Part.of("strategy", options))
        config = replace(config, virtual_world_size=None, callbacks={}, freeze=[])
        config.eval.every_steps = None
        source = source_of(given.run, given.checkpoint, storage=config.checkpoint.storage)
        code = attempt(config, preemption, source, split=given.split, as_json=given.json)
    except MusterError as error:
        tell(error)
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # as python -m train does: no tear-down


if __name__ == "__main__":
    main()
