"""The weights of a run: those of the finished run, or of a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from muster import outcome
from muster.checkpoint.backends.base import STEP, name
from muster.checkpoint.commit import Saved, Storage
from muster.checkpoint.schemas import read_best
from muster.checkpoint.weights import Evaluated, lists_beside, modules_of, read_evaluated, read_weights
from muster.errors import ConfigError, MusterError, say
from muster.redact import redacted
from muster.report.results import best_in
from muster.train.models.prepare import take
from muster.train.strategies.replicas.buffers import Buffers
from muster.world.group import World

CONFIG = "config.yaml"


def chosen_run(folder: Path, checkpoint: str | None = None) -> tuple[Path, str | None]:
    """Return the run and the checkpoint that `folder` stands for: of a sweep's folder, its best run, which rank 0 prints.

    If `checkpoint.best` chose the run, its best checkpoint is taken unless `checkpoint` is given. Raises ConfigError.
    """
    found = best_in(folder)
    if not found:
        return folder, checkpoint
    best, line = found
    if os.environ.get("RANK", "0") == "0":
        say(line)
    return best.folder, checkpoint or ("best" if best.metric else None)


class Source:
    """The weights of a run: its `model.pt` (`saved` is None), or a checkpoint. Raises ConfigError.

    `checkpoint`: a step, `newest` or `best`; None: `model.pt` if the run is done, else the newest checkpoint. `storage`: where the
    checkpoints are; None: `checkpoints/` in the run's folder.
    """

    def __init__(self, run: Path, checkpoint: str | None = None, *, storage: str | None = None):
        self.run, self._place = run, storage or str(run / "checkpoints")
        self.saved: Saved | None = None
        if checkpoint or not self._is_done():
            self.saved = self._find(checkpoint or "newest")

    @cached_property
    def storage(self) -> Storage:
        """Some storage is remote, so it is opened only when it is used."""
        return Storage(self._place)

    @property
    def step(self) -> int | None:
        """The step of the weights; None if nothing says it."""
        return self.saved.step if self.saved else outcome.last(self.run).step

    @property
    def world_size(self) -> int:
        """The number of ranks that trained to these weights; 1 if nothing says it."""
        return int(self.saved.manifest["world_size"]) if self.saved else outcome.last(self.run).world_size or 1

    def __str__(self) -> str:
        return self.saved.path if self.saved else str(self.run)

    def modules(self) -> list[str]:
        """Return the names of the modules in the checkpoint, or in the newest one beside `model.pt`."""
        if not self.saved and not self.storage.steps():
            return ["model"]
        return modules_of(self.saved or self._find("newest"))

    def fill(self, model: nn.Module, world: World, *, objective: nn.Module | None = None) -> None:
        """Load the weights and buffers that the run evaluated with into `model`, and the objective's state.

        Raises ConfigError: they do not fit. Raises StorageError: they cannot be read.
        """
        buffers = Buffers(model, world, objective=objective)
        found = self._read(buffers, says=world.is_first)
        take(model, found.weights, None)
        buffers.put(found.beside)

    def fill_module(self, module: nn.Module, tracked: str) -> None:
        """Load what a job tracks by the name `tracked` from a checkpoint into `module`. Raises as `fill` does."""
        saved = self.saved = self.saved or self._find("newest")
        there = modules_of(saved)
        if tracked not in there:
            raise ConfigError(f"{saved.path} has no module {tracked}: it has {', '.join(there) or 'none'}")
        take(module, read_evaluated(saved, module=tracked).weights, None)

    def _is_done(self) -> bool:
        """Return True if model.pt has the newest weights: a finished run that trains on keeps its old one meanwhile."""
        if not (self.run / "model.pt").exists():
            return False
        return outcome.last(self.run).outcome in ("none", outcome.DONE) or not self.storage.steps()

    def _read(self, buffers: Buffers, *, says: bool) -> Evaluated:
        """Read the weights and buffers that the run evaluated with. Raises MusterError.

        If `model.pt` lacks some of `buffers` and the newest checkpoint has them, the checkpoint is read instead. If no checkpoint can
        be read, a rank with `says` prints that these buffers keep their initial values.
        """
        if self.saved:
            return read_evaluated(self.saved, module=self._only_module(self.saved))
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
                    f"in {redacted(self._place)} can be read: they keep their initial values"
                )
        return Evaluated(weights, {})

    def _only_module(self, saved: Saved) -> str:
        """Return the name of the module in a checkpoint that is the model. Raises ConfigError if none is."""
        there = modules_of(saved)
        if "model" in there or len(there) == 1:
            return "model" if "model" in there else there[0]
        names = ", ".join(there) or "none"
        raise ConfigError(
            f"{saved.path} has no module named model, but {names}: name those to load, "
            f"muster.load({str(self.run)!r}, into={{name: module}})"
        )

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
        there = ", ".join(name(each) for each in reversed(steps)) or "none"
        if checkpoint == "best":
            raise ConfigError(
                f"the best checkpoint, of step {step}, is no longer in {self.storage.root}: use one of {there}"
            )
        raise ConfigError(
            f"checkpoint {checkpoint} is not in {self.storage.root}: use newest, best or one of its steps: {there}"
        )

    def _best(self) -> int:
        if best := read_best(self.run):
            return best.step
        raise ConfigError(
            f'{self.run} has no readable best.json, which checkpoint.best=accuracy writes, and job.evaluate(..., best="accuracy") of a muster.Job: give a step as the checkpoint'
        )


def config_of(folder: Path) -> dict[str, Any]:
    """Read config.yaml of the run in `folder`. Raises ConfigError."""
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{folder} is not a run's folder: it has no readable {CONFIG}; give output_dir, such as runs/NAME"
        )
    return config


def is_of_job(config: Mapping[str, Any]) -> bool:
    """Return True for the config of a run of `muster.Job`, which names no model."""
    return not isinstance(config.get("model"), dict)
