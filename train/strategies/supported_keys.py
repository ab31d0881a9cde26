"""Config keys that a strategy supports. Setting an unsupported key is a ConfigError before any rank trains."""

from __future__ import annotations

from typing import Any

from muster.errors import ConfigError
from muster.train.config.keys import Config, NonFinite, Precision

MADE_BY = {
    "grad_clip": {"step"},
    "precision": {"step"},
    "on_nonfinite": {"step"},
    "log.train_metrics": {"step"},
    "virtual_world_size": {"build", "step"},
    "compile": {"build"},
    "channels_last": {"build"},
    "scheduler": {"lr"},
    "metrics": {"evaluate"},
}
"""Config key -> the strategy methods that implement it."""
CONSTANT = "muster.train.optim.constant."


def honoured(kind: type) -> frozenset[str]:
    """The config keys that the strategy class `kind` supports: the `honours` of the nearest class in the MRO that declares it.

    A subclass below that class loses the keys of a method that it overrides: only its author knows whether it still implements them.
    """
    lost: set[str] = set()
    for each in kind.__mro__:
        if "honours" in vars(each):
            return frozenset(vars(each)["honours"]) - lost
        lost |= {key for key, methods in MADE_BY.items() if methods & vars(each).keys()}
    return frozenset()


def check_honoured(config: Config, strategy: Any) -> None:
    """Raise ConfigError for a key that the config sets and `strategy` does not support."""
    kept = honoured(type(strategy))
    for key, value in given(config).items():
        if key not in kept:
            name = type(strategy).__name__
            raise ConfigError(
                f"{key}={value} is not supported by strategy {name}, which would ignore it: leave it out, or, if its own "
                f'{" and ".join(sorted(MADE_BY[key]))} implements it, or calls super(), declare honours = {{"{key}"}} in class {name}'
            )


def given(config: Config) -> dict[str, Any]:
    """The keys of MADE_BY that the config sets to a value with an effect; virtual_world_size has its own check."""
    asked = {
        "grad_clip": config.grad_clip,
        "precision": config.precision.name if config.precision is not Precision.fp32 else None,
        "on_nonfinite": config.on_nonfinite.name if config.on_nonfinite is not NonFinite.stop else None,
        "log.train_metrics": "true" if config.log.train_metrics else None,
        "compile": "true" if config.compile else None,
        "channels_last": "true" if config.channels_last else None,
        "scheduler": None if config.scheduler.target.startswith(CONSTANT) else config.scheduler.target,
        "metrics": "{" + ",".join(config.metrics) + "}" if config.metrics else None,
    }
    return {key: value for key, value in asked.items() if value is not None}


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
