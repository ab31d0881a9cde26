"""What Hydra or OmegaConf found wrong, in one line, with the nearest valid name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from train.config import schema
from train.config.schema import Config
from train.errors import ConfigError, nearest, one_line


def conf_folder() -> Path:
    """conf/ of the checkout, or the copy of it inside the installed package."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def explain(error: Exception) -> ConfigError:
    """Say what Hydra or OmegaConf found in one line, with the nearest valid name."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(error)
    if match := re.search(r"Could not (?:override|delete from config) '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, option = match[1], match[2]
        options = available(group)
        if not options:
            return ConfigError(f"{group}={option}: there is no config group {group}; {nearest(group, schema.GROUPS)}")
        own = f", or {group}._target_=your.Own" if group in schema.GROUPS else ""
        return ConfigError(f"{group}={option} is unknown; {nearest(option, options)}{own}")
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
    if elsewhere := [known for known in all_keys() if known.endswith(f".{last}")]:
        return ConfigError(f"unknown key {key}; did you mean {' or '.join(elsewhere[:3])}?")
    if names is None:
        return ConfigError(f"unknown key {key}; {nearest(key.split('.')[0], known_keys('') or [])}")
    own = f"; for a parameter of your own class write +{key}=..." if parent in schema.GROUPS else ""
    return ConfigError(f"unknown key {key}; {nearest(last, names)}{own}")


def known_keys(parent: str) -> list[str] | None:
    """Keys below `parent`; of a group, those of all its options. None if there is no such place."""
    tree: Any = schema.to_dict(Config())
    if parent in schema.GROUPS:
        return sorted({key for option in schema.SCHEMAS[parent].values() for key in schema.to_dict(option())})
    for part in parent.split(".") if parent else []:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return sorted(tree) if isinstance(tree, dict) else None


def all_keys() -> list[str]:
    """Every key of the schema by its full name, those of all options included."""
    options = [f"{group}.{key}" for group in schema.GROUPS for key in known_keys(group) or [] if key != "_target_"]
    return sorted({*options, *schema.flatten(Config())})


def available(group: str) -> list[str]:
    folder = conf_folder() / group
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder.is_dir() else []
