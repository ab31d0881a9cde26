"""What does not go together with a model that is laid out by hand."""

from __future__ import annotations

from train.config.keys import Config, Precision
from train.errors import ConfigError


def refuse(config: Config, strategy: str) -> None:
    """Raise ConfigError for what a `strategy` that divides the model itself does not go with."""
    if config.compile:
        raise ConfigError(f"compile=true does not go with strategy={strategy}: leave it out, or use strategy=ddp")
    if config.channels_last:
        raise ConfigError(f"channels_last=true does not go with strategy={strategy}: leave it out, or use strategy=ddp")
    if config.precision is Precision.fp16:
        raise ConfigError(f"precision=fp16 does not go with strategy={strategy}: use fp32 or bf16")
