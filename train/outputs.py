"""The loggers that a config selects."""

from __future__ import annotations

from pathlib import Path

from train.config.keys import Config
from train.config.parts import build
from train.errors import MusterError, one_line, say
from train.loggers.base import Logger
from train.loggers.console import console
from train.loggers.jsonl import NAME, Jsonl, read


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
            say(f"muster: loggers.{name} cannot begin, the run does without it: {one_line(error)[:200]}")
    restarts = sum("world_size" in record for record in read(folder / NAME))  # one `start` or `resume` per attempt
    shown = console(config.log.progress.name, step=step, total_steps=total_steps, restarts=restarts)
    return [Jsonl(folder, step, evaluated=evaluated), shown, *own]
