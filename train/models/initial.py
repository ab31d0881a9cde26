"""The weights that a model starts with: `init_from`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.backends.base import name
from muster.checkpoint.download import local_copy
from muster.checkpoint.schemas import read_best
from muster.checkpoint.weights import read_weights
from muster.errors import ConfigError, MusterError, StorageError, say
from muster.report.results import best_in
from muster.train.config.keys import Config
from muster.world.group import World


def first_weights(config: Config, world: World) -> dict[str, Any] | None:
    """Return the state dict that `init_from` names, or None. Collective. Raises MusterError.

    One of the ranks that share torch.hub's folder downloads while the others wait.
    """
    if not config.init_from:
        return None
    failure, weights, source = None, dict[str, Any](), config.init_from
    with world.local_first(torch.hub.get_dir()) as goes_first:
        try:
            if "://" in source:
                source = str(local_copy(source, ask=goes_first))
            weights = read_weights(source if "://" in config.init_from else _chosen(source, says=world.is_first))
        except MusterError as error:
            failure = error
    world.together(failure)
    if source != config.init_from and len({*world.gather(Path(source).name)}) > 1:  # the file name is its digest
        raise StorageError(f"init_from={config.init_from} changed while the nodes downloaded it: run again")
    return weights


def _chosen(source: str, *, says: bool) -> str:
    """Return `source`; for a sweep's folder, its best run, or the best checkpoint of it if `checkpoint.best` chose it."""
    if not (found := best_in(Path(source))):
        return source
    best, line = found
    if says:
        say(line)
    if not best.metric:
        return str(best.folder)
    noted = read_best(best.folder)
    places = [best.folder / "checkpoints" / name(best.step or 0), *([Path(noted.path)] if noted and noted.path else [])]
    if found_at := next((place for place in places if place.is_dir()), None):
        return str(found_at)
    raise ConfigError(
        f"init_from={source}: the best checkpoint, of step {best.step}, is not in {places[0].parent}: give the path of a "
        "checkpoint, or of a run's model.pt"
    )
