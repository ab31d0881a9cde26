"""The choice of the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from muster.checkpoint.backends.base import STEP
from muster.checkpoint.commit import Saved, Storage
from muster.checkpoint.manager import newest, verify
from muster.errors import ConfigError, NoValidCheckpoint
from muster.world.group import World


def find_checkpoint(
    place: Storage, resume: str, world: World, noted: Mapping[str, Any] | None
) -> tuple[Saved | None, list[str]]:
    """Return the run's newest valid checkpoint, else the one that `resume` names; and the damage to bad checkpoints. Collective.

    `place`: storage of the run's own checkpoints. `resume`: `auto`, `never`, or a path or URL to start from if the run has no
    checkpoint of its own. `noted`: newest commit, {step, path}, from the record of the previous attempt.

    Raises NoValidCheckpoint: checkpoints exist or existed, and none is valid; the run never silently starts from zero.
    Raises ConfigError: `resume` is not a folder.
    """
    bad: list[str] = []
    world.on_first(place.prepare)
    own = newest(place, world, on_bad=bad.append)
    if own is None and noted:
        raise NoValidCheckpoint(
            f"step {noted['step']} was saved as {noted['path']}, but {place.root} has no checkpoint: "
            "restore it, set checkpoint.storage back, or start over with checkpoint.resume=never"
        )
    named = resume.rstrip("/")
    if own or named in ("auto", "never"):
        return own, bad
    return _named(named, world, bad), bad


def _named(named: str, world: World, bad: list[str]) -> Saved:
    """Collective."""
    root, _, last = named.rpartition("/")
    inside = Path(named, "checkpoints")
    found, nested = world.on_first(partial(_folders, named, inside))
    if "://" not in named and not found:
        raise ConfigError(
            f"checkpoint.resume={named} is not a folder: use auto, never, the folder of a run or of a checkpoint, or a URL"
        )
    if match := STEP.fullmatch(last):
        return verify(Storage(root or "."), int(match[1]), world)
    other = newest(Storage(str(inside) if nested else named), world, on_bad=bad.append, own=False)
    if other is None:
        raise NoValidCheckpoint(f"checkpoint.resume={named} has no checkpoint: use the folder of another run")
    return other


def _folders(named: str, inside: Path) -> list[bool]:
    return [Path(named).is_dir(), inside.is_dir()]
