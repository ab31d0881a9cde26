"""The position of a run, restored from a checkpoint, and the facts that a checkpoint keeps about its run."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint import manager
from muster.checkpoint.records import is_better, read_best
from muster.checkpoint.storage import Saved
from muster.dist.world import World
from muster.errors import say
from muster.job.folder import RunFolder
from muster.train.callbacks.all import Callbacks
from muster.train.config.differences import to_dict
from muster.train.config.keys import Config
from muster.train.course import Progress
from muster.train.data.load import Data
from muster.train.numerics import seed_all
from muster.train.strategies.base import Strategy
from muster.train.window import Window


def restore(
    config: Config, world: World, folder: RunFolder, strategy: Strategy, callbacks: Callbacks, window: Window
) -> Progress:
    """Restore strategy, callbacks, loss sums and random number generators, and return the progress to continue from.

    Without a checkpoint, only seed the generators. Collective: every rank must call it.
    """
    saved = folder.saved
    seed_all(config.seed, world.rank, step=saved.step if saved else 0)
    if saved is None:
        return Progress()
    manager.restore(saved, strategy, callbacks, window)
    manifest = saved.manifest
    return Progress(
        step=saved.step,
        evaluated=manifest.get("evaluated", saved.step),
        best=world.on_first(partial(known_best, config, folder.path, saved)),
        stopped=manifest.get("stopped") if ends_alike(config, manifest.get("config", {})) else None,
    )


def known_best(config: Config, folder: Path, saved: Saved) -> dict[str, Any] | None:
    """Return the best evaluation up to `saved`. best.json is read, too: only it has one after the last save."""
    metric, best = config.checkpoint.best, saved.manifest.get("best")
    if not metric:
        return None
    if best and best["metric"] != metric:
        say(
            f"muster: checkpoint.best={metric} was {best['metric']}: the search for the best starts again at step {saved.step}"
        )
        best = None
    noted = read_best(folder)
    if noted and noted.metric == metric and noted.step <= saved.step:
        if not best or is_better(metric, noted.value, best["value"]):
            best = {"metric": metric, "value": noted.value, "step": noted.step}
    return best


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
