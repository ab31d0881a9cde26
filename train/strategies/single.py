"""Training in one process."""

from __future__ import annotations

from muster.errors import ConfigError
from muster.train.config.keys import Config
from muster.train.strategies.replicas.replicated import Replicas


class Single(Replicas):
    honours = frozenset({*Replicas.honours, "virtual_world_size"})

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if world_size > 1:
            raise ConfigError(f"strategy=single takes one process and was started with {world_size}: use strategy=ddp")
