"""What a run leaves beside its checkpoints: the records of the loggers that a config selects, times, the report."""

from __future__ import annotations

import socket
from pathlib import Path

from muster.dist.world import World
from muster.errors import MusterError, one_line, say
from muster.loggers.base import Logger
from muster.loggers.console import console
from muster.loggers.jsonl import NAME, Jsonl, read
from muster.loggers.metrics import Metrics
from muster.report.page import write_report
from muster.timing.record import Timing
from muster.train.config.keys import Config
from muster.train.config.parts import build
from muster.train.course import Course


def open_records(config: Config, world: World, course: Course, *, is_finished: bool) -> Metrics:
    """Open the records of a run at its present step; they do nothing on other ranks than 0.

    Collective: every rank must call it. is_finished: the run needs no further step. Raises ConfigError or StorageError
    if a logger cannot be built.
    """
    progress = course.progress
    evaluated = None if is_finished or not progress.step else progress.evaluated
    loggers = (
        open_loggers(config, step=progress.step, total_steps=course.total_steps, evaluated=evaluated)
        if world.is_first
        else []
    )
    times = record_times(config, world, step=progress.step)
    return Metrics(loggers, samples=course.plan.samples_before(progress.step), windows=times)


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
    restarts = sum("world_size" in record for record in read(folder / NAME))  # one `start` or `resume` per attempt
    shown = console(config.log.progress.name, step=step, total_steps=total_steps, restarts=restarts)
    return [Jsonl(folder, step, evaluated=evaluated), shown, *own]


def record_times(config: Config, world: World, *, step: int) -> Timing | None:
    """Return the writer of timing.jsonl on rank 0, None elsewhere. Collective: every rank must call it."""
    hosts = world.gather(socket.gethostname())
    return Timing(Path(config.output_dir), hosts=hosts, attempt=world.attempt, step=step) if world.is_first else None


def report(path: Path) -> None:
    """Write report.html. A failure is printed and never fails the run."""
    try:
        write_report(path)
    except Exception as error:
        say(f"muster: no report.html: {one_line(error)[:300]}; `muster report {path}` writes it again")
