"""Refusal to resume from a checkpoint with a changed config or changed data."""

from __future__ import annotations

from pathlib import Path

import torch

from muster.checkpoint.storage import Saved
from muster.errors import ConfigError, DataError, MusterError
from muster.train.config.differences import differences
from muster.train.config.keys import Config
from muster.train.config.parts import TARGET, locate, signature


def refuse_changes(config: Config, saved: Saved, *, fingerprint: str, total_steps: int) -> MusterError | None:
    """Return the error that forbids resuming from `saved` with this config and data, or None."""
    if config.checkpoint.accept_changes:
        return None
    if changed := differences(saved.manifest.get("config", {}), config):
        place = config.checkpoint.storage or config.output_dir
        said = "; ".join([*changed[:5], *(["..."] if changed[5:] else [])])
        remedy = "resume all the same with checkpoint.accept_changes=true, or start over with checkpoint.resume=never"
        if config.checkpoint.resume not in ("auto", "never") and not saved.path.startswith(f"{place}/"):
            return ConfigError(f"{saved.path} is of another run: {said}. Give it the same values, {remedy}")
        return ConfigError(f"{place} holds another run: {said}. {_elsewhere(config, changed)}, {remedy}")
    if saved.manifest.get("fingerprint") != fingerprint:
        return DataError(
            f"the training data has changed since {saved.path} was written (fingerprint {saved.manifest.get('fingerprint')}, "
            f"now {fingerprint}): restore it, or resume all the same with checkpoint.accept_changes=true"
        )
    threads = saved.manifest.get("threads")
    if config.virtual_world_size and threads and threads != torch.get_num_threads():
        return ConfigError(
            f"{saved.path} was trained with {threads} threads a rank, and this is {torch.get_num_threads()}: with virtual_world_size the "
            f"weights would differ. Set OMP_NUM_THREADS={threads}, or resume all the same with checkpoint.accept_changes=true"
        )
    planned = saved.manifest.get("total_steps")
    fixed = "total_steps" in config.scheduler.values or {"epochs", "steps_per_epoch"} <= config.scheduler.values.keys()
    if planned != total_steps and not fixed and "total_steps" in signature(locate(config.scheduler)):
        return ConfigError(
            f"the learning rate of {config.scheduler.target} depends on the length of the run, which was {planned} steps and now is "
            f"{total_steps}: it would jump. Give max_steps={planned}, or resume all the same with checkpoint.accept_changes=true"
        )
    return None


def _elsewhere(config: Config, changed: list[str]) -> str:
    """Return what to write to train in another folder: a name that is free, if the folder is named after `name`."""
    if config.checkpoint.storage:
        return "Give another checkpoint.storage"
    folder = Path(config.output_dir)
    if folder.name != config.name:
        return "Give another output_dir"
    chosen = [line.rpartition(".")[2].lower() for line in changed if line.partition(":")[0].endswith(TARGET)]
    names = (
        f"{base}{n}" for n in ("", *(f"-{n}" for n in range(2, 1000))) for base in chosen or [f"{config.name}-new"]
    )
    return f"Add name={next((name for name in names if not (folder.parent / name).exists()), 'another')}"
