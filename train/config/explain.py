"""What Hydra or OmegaConf found wrong, in one line, with the nearest valid name."""

from __future__ import annotations

import re
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from train.config.differences import to_dict
from train.config.keys import GROUPS, Config, keys
from train.config.options import options, values
from train.config.parts import TARGET
from train.errors import ConfigError, nearest, one_line


def explain(error: Exception) -> ConfigError:
    """Say what Hydra or OmegaConf found in one line, with the nearest valid name."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(error)
    if match := re.search(r"Could not (?:override|delete from config) '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"An item is already at '([^']+)'.*?prefix: '([^']+)'", text, re.S):
        return ConfigError(f"{match[1]} is there already: write {match[2]}, without +")
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, option = match[1], match[2]
        there = options(group)
        if not there:
            return ConfigError(f"{group}={option}: there is no config group {group}; {nearest(group, GROUPS)}")
        own = f", or {group}._target_=your.Own" if group in GROUPS else ""
        return ConfigError(f"{group}={option} is unknown; {nearest(option, there)}{own}")
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return unknown_key(match[1])
    if key := getattr(cause, "full_key", None):
        reason = one_line(cause).split(" full_key:")[0]
        if "Interpolation" in type(cause).__name__ or "nterpolation" in reason:
            return ConfigError(f"{key}: {reason}")
        return ConfigError(f"{key}: {reason}; see `python -m train --help` for its type")
    if (
        override := getattr(error, "override", None)
        or (re.findall(r"Error parsing override '(.*)'", text) or [None])[0]
    ):
        return ConfigError(
            f"cannot read the override {override!r}: write key=value, with quotes around a value that has = or blanks in it: key=\"'a=b'\""
        )
    return ConfigError(f"{one_line(error)}: write overrides as key=value")


def unknown_key(key: str) -> ConfigError:
    parent, _, last = key.rpartition(".")
    names = known_keys(parent)
    own = f"; for a parameter of your own class write +{key}=..." if parent in GROUPS else ""
    if theirs := [f"{parent}={each}" for each in options(parent) if last in values(parent, each)] if own else []:
        return ConfigError(f"{key} is a key of {' or '.join(theirs)}, not of the {parent} chosen{own}")
    if elsewhere := [known for known in all_keys() if known.endswith(f".{last}")]:
        return ConfigError(f"unknown key {key}; did you mean {' or '.join(elsewhere[:3])}?")
    if names is None:
        return ConfigError(f"unknown key {key}; {nearest(key.split('.')[0], known_keys('') or [])}")
    return ConfigError(f"unknown key {key}; {nearest(last, names)}{own}")


def known_keys(parent: str) -> list[str] | None:
    """Keys below `parent`; of a group, those of all its options. None if there is no such place."""
    if parent in GROUPS:
        return sorted({key for option in options(parent) for key in values(parent, option)})
    tree: Any = to_dict(Config())
    for part in parent.split(".") if parent else []:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return sorted(tree) if isinstance(tree, dict) else None


def all_keys() -> list[str]:
    """Every key by its full name, those of all options included."""
    parts = [f"{group}.{key}" for group in GROUPS for key in known_keys(group) or [] if key != TARGET]
    return sorted({*parts, *(key.name for key in keys())})
