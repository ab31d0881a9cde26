"""The records of the loggers that a config selects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muster.dist.world import World
from muster.errors import MusterError, one_line, say
from muster.job.records import record_times
from muster.loggers import trainjob
from muster.loggers.base import Logger
from muster.loggers.console import console
from muster.loggers.jsonl import NAME, Jsonl, events
from muster.loggers.metrics import Metrics, Rates
from muster.train.config.keys import Config
from muster.train.config.parts import build
from muster.train.course import Course


def open_records(
    config: Config,
    world: World,
    course: Course,
    hosts: Sequence[str],
    *,
    is_finished: bool,
    rates: Rates = lambda speed, counted: {},
) -> Metrics:
    """Open the records of a run at its present step; they do nothing on other ranks than 0.

    hosts: the host of each rank. is_finished: the run needs no further step. rates: see Metrics. Raises ConfigError or
    StorageError if a logger cannot be built.
    """
    progress = course.progress
    evaluated = None if is_finished or not progress.step else progress.evaluated
    loggers = (
        open_loggers(config, step=progress.lines, total_steps=course.total_steps, evaluated=evaluated)
        if world.is_first
        else []
    )
    times = record_times(Path(config.output_dir), world, hosts=hosts, step=progress.step)
    return Metrics(loggers, samples=course.plan.samples_before(progress.step), windows=times, rates=rates)


def open_loggers(config: Config, *, step: int, total_steps: int, evaluated: int | None = None) -> list[Logger]:
    """Build the loggers, on the rank that writes (rank 0).

    A logger that fails to start is printed and left out. Raises ConfigError, StorageError.
    """
    folder = Path(config.output_dir)
    chosen = {name: part for name, part in config.loggers.items() if config.log.tensorboard or name != "tensorboard"}
    offered = {"folder": folder, "name": config.name, "step": step, "total_steps": total_steps}
    own: list[Logger] = []
    for name, part in chosen.items():
        try:
            own.append(build(part, **offered))
        except MusterError:
            raise
        except Exception as error:
            say(f"muster: loggers.{name} cannot start, the run continues without it: {one_line(error)[:200]}")
    earlier = events(folder / NAME)
    shown = console(config.log.progress.name, step=step, total_steps=total_steps, earlier=earlier)
    status = trainjob.of_environment(step=step, total_steps=total_steps)
    return [Jsonl(folder, step, evaluated=evaluated), shown, *status, *own]
