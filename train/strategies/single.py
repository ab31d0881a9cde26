"""Training in one process."""

from __future__ import annotations

from train.config.keys import Config
from train.errors import ConfigError
from train.strategies.common.replicas import Replicas


class Single(Replicas):
    """Train in one process."""

    honours = frozenset({*Replicas.honours, "virtual_world_size"})

    def check(self, config: Config, world_size: int) -> None:
        """Raise ConfigError for a world size above 1."""
        super().check(config, world_size)
        if world_size > 1:
            raise ConfigError(f"strategy=single takes one process and was started with {world_size}: use strategy=ddp")
