"""Options that do not combine with a strategy that partitions the model itself."""

from __future__ import annotations

from muster.errors import ConfigError
from muster.train.config.keys import Config, Precision


def refuse(config: Config, strategy: str) -> None:
    """Raise ConfigError for options that do not combine with a `strategy` that partitions the model itself."""
    if config.compile:
        raise ConfigError(
            f"compile=true cannot be combined with strategy={strategy}: leave it out, or use strategy=ddp"
        )
    if config.channels_last:
        raise ConfigError(
            f"channels_last=true cannot be combined with strategy={strategy}: leave it out, or use strategy=ddp"
        )
    if config.precision is Precision.fp16:
        raise ConfigError(f"precision=fp16 cannot be combined with strategy={strategy}: use fp32 or bf16")
