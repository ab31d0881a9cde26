"""The save of the last step when a rank is lost for good: each rank that is left holds all of a replicated state.

The ranks that are left agree in the run's folder, since the rendezvous store may be lost, too. The one that creates a marker
there commits a checkpoint alone. The others wait for it, since torchrun ends a node's ranks once one of them has ended, and
restarts the other nodes without it. A rank that learns of the loss late, when those that it waits for have ended, saves if
the others could not. A part of a divided network that has been superseded commits nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import outcome
from muster.checkpoint.state import is_finite
from muster.errors import MusterError, StorageError, say
from muster.files import DRAFT
from muster.lease.folder_lease import newest_claim
from muster.lease.open_folder import RunFolder
from muster.loggers.jsonl import NAME, tail
from muster.loggers.metrics import is_same
from muster.recovery.trainee import Steps
from muster.world.dtensor import own_piece
from muster.world.group import World

SAVED_S = 25.0
"""The longest wait for another rank's save: torchrun ends a node's other ranks 30 s after one has ended."""
NOTICED_S = 0.5
"""The time within which an error reaches all ranks that it reaches at all."""
POLL_S = 0.05
POLLS_PER_S = 2000.0  # of all ranks together: the folder may be on a file server


def save_emergency(world: World, folder: RunFolder, *, step: int, save: Callable[[], None] | None) -> None:
    """Save this rank's last `step` on one of the ranks that are left, or wait for that. Every rank that is left must call it.

    save: writes and commits a checkpoint; None: this rank cannot.
    """
    marker = folder.path / f"{DRAFT}emergency-{world.attempt}"  # a later claim deletes one that is left
    pause_s, began = max(POLL_S, world.size / POLLS_PER_S), time.monotonic()
    while time.monotonic() - began < SAVED_S and not _is_saved(folder.path, step):
        try:
            is_mine = save is not None and _takes(marker)
        except OSError:  # the folder is gone, or read-only: nobody can save
            return
        if save and is_mine:
            try:
                _save(world, folder, step=step, save=save)
            finally:
                with contextlib.suppress(OSError):
                    marker.unlink(missing_ok=True)
            return
        if not save and time.monotonic() - began > NOTICED_S and not marker.exists():
            return
        time.sleep(pause_s)


def make_up(running: Steps, folder: RunFolder) -> None:
    """Write the last lines before a save that one rank has made alone: the rank that writes them may have been lost.

    The save's manifest has the lines as `recent`, and the number of samples whose loss is lost as `unlogged`.
    """
    saved = folder.saved
    if saved is None or saved.storage.root != running.checkpoints.storage.root:  # another run's, to start from
        return
    if recent := saved.manifest.get("recent"):
        _, known = tail(folder.path / NAME, until=partial(is_same, recent[0]))
        running.records.make_up(recent, known=known)
    if samples := saved.manifest.get("unlogged"):
        running.records.event(
            "note",
            step=running.step,
            text=f"a rank was lost after step {running.step}, with its part of the loss of the last {samples} samples: no "
            "train line has it; what was logged since the line before is that of the rank that has saved",
        )


def last_lines(running: Steps) -> list[dict[str, Any]]:
    """Return the last lines of `running` for `recent`: rank 0 may be lost before it has written those of one step."""
    return [record for record in running.records.recent if record["kind"] in ("train", "eval")][-2:]


def check_finite(parameters: Iterable[Tensor], step: int) -> None:
    """Raise StorageError if a parameter is not finite at `step`; no communication."""
    if not all(is_finite(own_piece(each.detach())) for each in parameters):
        raise StorageError(f"weights are not finite at step {step}")


def _save(world: World, folder: RunFolder, *, step: int, save: Callable[[], None]) -> None:
    try:
        if _is_saved(folder.path, step) or newest_claim(folder.path)[1].get("attempt") != world.attempt:
            return
        began = time.monotonic()
        save()
        say(f"muster: rank {world.rank} has saved step {step} in {time.monotonic() - began:.1f} s: no step is repeated")
    except MusterError as error:
        say(f"muster: the steps since the last checkpoint are repeated: {error}")


def _is_saved(folder: Path, step: int) -> bool:
    newest = outcome.last(folder).checkpoint
    return newest is not None and newest["step"] >= step


def _takes(marker: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        marker.open("x", encoding="utf-8").close()
        return True
    return False
