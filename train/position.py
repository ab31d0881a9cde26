"""The position of a run, restored from a checkpoint, and the facts that a checkpoint keeps about its run."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.records import direction_before, is_better, read_best
from muster.checkpoint.storage import Saved, Storage
from muster.dist.world import World
from muster.errors import say
from muster.job.folder import RunOptions
from muster.train.config.differences import to_dict
from muster.train.config.keys import Config
from muster.train.course import Progress
from muster.train.data.load import Data
from muster.train.evaluation import best_mode
from muster.train.numerics import seed_all
from muster.train.objectives.measure import Measures


def reached(config: Config, options: RunOptions, measures: Measures, world: World, saved: Saved | None) -> Progress:
    """Return the progress at a checkpoint, or before the first step (None), and seed the generators. Collective.

    options: where the run's own checkpoints are; `saved` may be another run's.

    Raises:
        ConfigError: nothing says which value of `checkpoint.best` is the best.
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
        best=world.on_first(partial(known_best, config, options.output_dir, saved, own, mode=mode)),
        stopped=manifest.get("stopped") if ends_alike(config, manifest.get("config", {})) else None,
    )


def known_best(config: Config, folder: Path, saved: Saved, own: Storage, *, mode: str) -> dict[str, Any] | None:
    """Return the best evaluation up to `saved`. best.json is read, too: only it has one after the last save.

    One whose checkpoint is not among the run's own does not count: `saved` may be another run's.
    """
    metric, best = config.checkpoint.best, saved.manifest.get("best")
    if not metric:
        return None
    steps = own.steps()
    if best and best["step"] not in steps:
        say(
            f"muster: the best evaluation so far, of step {best['step']}, has no checkpoint in this run: the search for the "
            f"best starts again at step {saved.step}"
        )
        best = None
    if best:
        best = {**best, "mode": best.get("mode") or direction_before(best["metric"])}
    if best and (best["metric"], best["mode"]) != (metric, mode):
        was = f"{best['mode']} {best['metric']}"
        say(
            f"muster: checkpoint.best={metric} ({mode}) was {was}: the search for the best starts again at step {saved.step}"
        )
        best = None
    noted = read_best(folder)
    if noted and (noted.metric, noted.mode) == (metric, mode) and noted.step <= saved.step and noted.step in steps:
        if not best or is_better(noted.value, best["value"], mode=mode):
            best = {"metric": metric, "value": noted.value, "step": noted.step, "mode": mode}
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
