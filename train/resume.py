"""Resume a run from a checkpoint: its position, the facts that a checkpoint keeps, and the refusal of a changed config or data."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster.attempt.best import change_of_search, known_best
from muster.checkpoint.commit import Saved, Storage
from muster.errors import ConfigError, DataError, MusterError, say
from muster.lease.open_folder import RunOptions
from muster.train.config.differences import differences, to_dict
from muster.train.config.keys import Config
from muster.train.config.parts import TARGET, locate, signature
from muster.train.data.load import Data
from muster.train.evaluation import best_mode
from muster.train.numerics import seed_all
from muster.train.objectives.measure import Measures
from muster.train.progress import Progress
from muster.world.group import World


def reached(config: Config, options: RunOptions, measures: Measures, world: World, saved: Saved | None) -> Progress:
    """Return the progress at a checkpoint, or before the first step (None), and seed the generators. Collective.

    `options`: where the run's own checkpoints are; `saved` may be another run's.
    Raises ConfigError: nothing says which value of `checkpoint.best` is the best.
    """
    own = options.checkpoints
    mode = best_mode(config, measures, saved.manifest.get("best") if saved else None)
    seed_all(config.seed, world.rank, step=saved.step if saved else 0)
    if saved is None:
        return Progress()
    manifest = saved.manifest
    evaluated = counted = manifest.get("evaluated", saved.step)
    if config.checkpoint.best and saved.storage.root != own.root:
        evaluated = 0  # another run's evaluation is not compared with those of this one, which makes it itself
    return Progress(
        step=saved.step,
        evaluated=evaluated,
        counted=counted,
        best=world.on_first(partial(_best, config, options.output_dir, saved, own, mode=mode)),
        stopped=manifest.get("stopped") if ends_alike(config, manifest.get("config", {})) else None,
    )


def _best(config: Config, folder: Path, saved: Saved, own: Storage, *, mode: str) -> dict[str, Any] | None:
    """Return the best evaluation up to `saved`, if it is by the same metric in the same direction."""
    if not (metric := config.checkpoint.best):
        return None
    best = known_best(folder, saved, own)
    if text := change_of_search(best, metric, mode, key="checkpoint.best", step=saved.step):
        say(f"muster: {text}")
    return None if text else best


def ends_alike(config: Config, before: dict[str, Any]) -> bool:
    """Return True if callbacks, epochs and max_steps are as in config `before`: a stopped run then stays stopped."""
    now, before = to_dict(config), to_dict(before)
    return all(now[key] == before.get(key) for key in ("callbacks", "epochs", "max_steps"))


def identity(config: Config, data: Data, total_steps: int, kinds: list[str]) -> dict[str, Any]:
    """Return the facts that identify this run, for the manifest of its checkpoints."""
    plain = to_dict(config)
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    threads = torch.get_num_threads() if config.virtual_world_size else None
    facts = {"fingerprint": data.fingerprint, "total_steps": total_steps, "threads": threads, "computes_on": kinds}
    return {**facts, "config_hash": digest, "config": plain}


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
