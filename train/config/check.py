"""Validate a config without other ranks and before anything is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from muster.errors import ConfigError
from muster.train.config.choices import options
from muster.train.config.constraints import not_finite, out_of_range
from muster.train.config.error_messages import unknown_key
from muster.train.config.keys import GROUPS, SEVERAL, Config, keys
from muster.train.config.parts import Part, callable_of, checked_values

ENDPOINT = ("port", "host")
"""Keys of `metrics` that set where metrics are served; they are not metrics."""
ASIDE = {"optimizer": ("groups",), "metrics": ("of",)}
"""Keys of a group that are not passed to its part's constructor."""


def check(composed: DictConfig) -> Config:
    """Convert Hydra's composed config to dataclasses and parts, and validate it.

    Raises ConfigError: a key is unknown, a value is out of range, or a part does not accept its values.
    Raises OmegaConfBaseException: a value is missing or of the wrong type.
    """
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    if added := next(_added(plain, Config()), None):  # by +key, or by a YAML file: nothing would read it
        own = f"; values of your own are +own.{added}=..., and YAML and overrides read them as ${{own.{added}}}"
        raise ConfigError(f"{unknown_key(added)}{'' if '.' in added else own}")
    unchosen = [group for group in GROUPS if not isinstance(OmegaConf.select(composed, group), DictConfig)]
    if unchosen:
        valid = ", ".join(options(unchosen[0]))
        raise ConfigError(f"{unchosen[0]} is not chosen; valid: {valid}, or {unchosen[0]}._target_=your.Own")
    config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    parts: dict[str, Any] = {group: Part.of(group, getattr(config, group), ASIDE.get(group, ())) for group in GROUPS}
    endpoint = {name: config.metrics.pop(name, None) for name in ENDPOINT}
    for group in SEVERAL:
        nodes, aside = getattr(config, group).items(), ASIDE.get(group, ())
        parts[group] = {name: Part.of(f"{group}.{name}", node, aside) for name, node in nodes}
    if config.profile:
        parts["callbacks"] |= {"profile": Part("callbacks.profile", "muster.train.callbacks.profile.Profile")}
    if endpoint["port"] is not None:
        values = {name: value for name, value in endpoint.items() if value is not None}
        parts["loggers"] |= {"prometheus": Part("loggers.prometheus", "muster.loggers.prometheus.Prometheus", values)}
    config = replace(config, **parts, gpus=_devices(config.gpus))
    problems = (
        out_of_range(key.name, key.value, key.marks) or (key.name != "own" and not_finite(key.name, key.value)) or None
        for key in keys(config)
    )
    if problem := next(filter(None, problems), None):
        raise ConfigError(problem)
    if isinstance(config.eval.every_steps, str) and config.eval.every_steps != "off":
        raise ConfigError(
            f"eval.every_steps={config.eval.every_steps} is not valid: use a number of steps, null or off"
        )
    if config.checkpoint.every_s and config.checkpoint.every_epochs:
        raise ConfigError("checkpoint.every_s and checkpoint.every_epochs are both given: choose one interval")
    for name in ("name", "output_dir"):
        if not str(getattr(config, name)).strip():
            raise ConfigError(f"{name} is empty: give {name}=something, or leave it out")
    if config.dist.init_method != "env://" and not re.fullmatch(r"file:///.*[^/]", config.dist.init_method):
        raise ConfigError(
            f"dist.init_method={config.dist.init_method} is not valid: use env://, or file:///shared/path, a name in a folder "
            "that all ranks see"
        )
    several = (part for group in SEVERAL for part in getattr(config, group).values())
    for part in (*(getattr(config, group) for group in GROUPS), *several):
        checked_values(part)
    for name in ("collate_fn", "batch"):
        callable_of(f"loader.{name}", getattr(config.loader, name))
    return config


def _devices(given: Any) -> list[int] | None:
    """Return `gpus` as a list of device numbers; a single number becomes a list of one. Raises ConfigError."""
    if given is None:
        return None
    devices = given if isinstance(given, list) else [given]
    if not devices or any(type(each) is not int or each < 0 for each in devices):
        raise ConfigError(f"gpus={given} names no device: give numbers, as gpus=0 or gpus=[0,2], or leave it out")
    if len(set(devices)) != len(devices):
        raise ConfigError(f"gpus={devices} names a device twice: give each local rank one of its own")
    return devices


def _added(given: Mapping[Any, Any], known: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of keys in `given` that the kit's own groups, the dataclass `known` and those in it, do not have."""
    names = {field.name for field in fields(known)}
    for name, value in given.items():
        if name not in names:
            yield f"{prefix}{name}"
        elif is_dataclass(getattr(known, name)) and isinstance(value, Mapping):
            yield from _added(value, getattr(known, name), f"{prefix}{name}.")
