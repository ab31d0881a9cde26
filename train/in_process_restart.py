"""What the trainer keeps from one attempt to the next when a rank dies and is restarted in place: see muster/recovery/hand_over.py.

A survivor keeps its data and its records, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from muster.data.draw_detection import Watch
from muster.errors import say
from muster.recovery.hand_over import HandOver
from muster.recovery.survival import Survival, why_no_survival
from muster.train.config.keys import Config, Device, NonFinite, Precision
from muster.train.config.parts import locate
from muster.train.data.load import Data, load
from muster.train.numerics import set_numerics
from muster.train.strategies.ddp import Ddp
from muster.train.strategies.single import Single
from muster.world.environment import Environment
from muster.world.group import World, alone
from muster.world.group_options import GroupOptions

KEPT = ("build", "state", "targets", "load", "sync_parameters")
"""Methods of a strategy that has the state of ddp, and no other."""
SLOW_S = 2.0


class RunHandOver(HandOver):
    def __init__(self, survival: Survival | None):
        super().__init__(survival)
        self.data: Data | None = None
        self._loaded: Watch | None = None

    def join(
        self, config: Config, options: GroupOptions, environment: Environment, *, stopping: Callable[[], bool]
    ) -> World:
        """Meet the other ranks, after this process has loaded the data if they have it. Collective. Raises MusterError."""

        def prepare() -> None:
            with self._said_if_slow(environment.rank):
                self.load_data(config)

        return self.meet(options, environment, stopping=stopping, prepare=prepare)

    @contextlib.contextmanager
    def _said_if_slow(self, rank: int) -> Iterator[None]:
        died_of = self.survival.incarnation.died_of if self.survival else ""
        text = f"muster: rank {rank} has died ({died_of}) and loads its data again: the others wait for it"
        told = threading.Timer(SLOW_S, say, [text])
        told.daemon = True
        told.start()
        try:
            yield
        finally:
            told.cancel()

    def load_data(self, config: Config, world: World | None = None) -> Data:
        """Return the data, and leave the generators as they were once it was loaded: a data set may draw, and a model after it.

        A survivor has the data. A replacement loads it without the others (`world` is None), who do not load it again.
        """
        if self.data is None:
            set_numerics(config)
            self.data = load(config, world or alone(torch.device("cpu")))
            self._loaded = Watch()
        assert self._loaded
        self._loaded.restore()
        return self.data


def why_not(config: Config) -> str:
    """Return why a rank that dies ends all ranks, although dist.survive=true; empty if it is restarted in place."""
    if why := why_no_survival():
        return why
    if not _is_replicated(locate(config.strategy)):
        return f"strategy={_name(config.strategy.target)} does not hand on its state"
    reasons = {
        "compile=true": config.compile,
        "device=cuda": config.device is Device.cuda,
        "device=auto on a host with GPUs": config.device is Device.auto and Path("/dev/nvidiactl").exists(),
        "on_nonfinite=skip": config.on_nonfinite is NonFinite.skip,
        "precision=fp16": config.precision is Precision.fp16,
        "strategy.compression=powersgd": config.strategy.values.get("compression") == "powersgd",
        "dist.init_method other than env://": config.dist.init_method != "env://",
    }
    return next((said for said, is_so in reasons.items() if is_so), "")


def _name(target: str) -> str:
    """Return a strategy as a user names it: one of the kit by the file that it is in."""
    return target.rsplit(".", 2)[1] if target.startswith("muster.train.strategies.") else target


def _is_replicated(strategy: Any) -> bool:
    """Return whether a strategy is ddp or single, or one of a user's own that adds nothing to their state."""
    return isinstance(strategy, type) and any(
        issubclass(strategy, kind) and all(getattr(strategy, name) is getattr(kind, name) for name in KEPT)
        for kind in (Ddp, Single)
    )
