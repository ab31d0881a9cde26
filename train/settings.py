"""Settings of the runtime, taken from a run's config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from muster.doctor.base import Visit
from muster.lease.open_folder import RunOptions
from muster.loggers.base import Logger
from muster.train.config.differences import comparable, to_dict
from muster.train.config.keys import Config
from muster.train.config.parts import build
from muster.world.group_options import GroupOptions


def group_options(config: Config) -> GroupOptions:
    return GroupOptions(
        device=config.device.name,
        gpus=config.gpus,
        backend=config.dist.backend.name,
        timeout_s=config.dist.timeout_s,
        start_timeout_s=config.dist.start_timeout_s,
        shared_memory=config.dist.shared_memory,
        hierarchical=config.dist.hierarchical.name if config.virtual_world_size else "never",
        alike=comparable(config),
    )


def run_options(config: Config) -> RunOptions:
    return RunOptions(
        Path(config.output_dir),
        config=OmegaConf.to_yaml(OmegaConf.create(to_dict(config))),
        storage=config.checkpoint.storage,
        resume=config.checkpoint.resume,
        timeout_s=config.dist.timeout_s,
        max_idle_attempts=config.max_idle_attempts,
        max_idle_preemptions=config.max_idle_preemptions,
    )


def visit_of(config: Config, *, expected: int | None = None, quick: bool = False) -> Visit:
    return Visit(config.output_dir, workers=config.loader.num_workers or 0, expected=expected, quick=quick)


def loggers_of(config: Config) -> dict[str, Callable[..., Logger]]:
    """Return what creates the loggers that the config selects, by what they are called there."""
    chosen = {name: part for name, part in config.loggers.items() if config.log.tensorboard or name != "tensorboard"}
    return {f"loggers.{name}": partial(build, part) for name, part in chosen.items()}
