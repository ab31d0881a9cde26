"""Compare configs: which differences make another run, and which are allowed between ranks of one run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from muster.dotted_names import flatten
from muster.redact import redacted_all
from muster.train.config.constraints import FREE, LOCAL, Mark
from muster.train.config.keys import GROUPS, Config, keys
from muster.train.config.parts import TARGET, Part, marks

OURS = "muster.train.strategies."
"""Strategies in this package resume from the state that any other of them saved."""


def to_dict(node: Any) -> Any:
    """Convert a config to plain containers for YAML and JSON, with the secrets of URLs redacted (muster/redact.py).

    The result is for reading and comparing; it cannot be converted back.
    """
    if isinstance(node, Part):
        return {TARGET: node.target, **to_dict(node.values), **to_dict(node.aside)}
    if is_dataclass(node) and not isinstance(node, type):
        return {each.name: to_dict(getattr(node, each.name)) for each in fields(node)}
    if isinstance(node, Enum):
        return node.name
    if isinstance(node, dict):
        return {str(key): to_dict(value) for key, value in node.items()}
    return [to_dict(item) for item in node] if isinstance(node, (list, tuple)) else redacted_all(node)


def marked(config: Config, mark: Mark) -> set[str]:
    """Return the full names of all keys with `mark`, including those of parts."""
    own = {each.name for each in keys(config) if mark in each.marks}
    parts = [getattr(config, group) for group in GROUPS]
    return own | {key for part in parts if isinstance(part, Part) for key, said in marks(part).items() if mark in said}


def comparable(config: Config) -> dict[str, Any]:
    """Return the values that all ranks of an attempt must share, as a flat dict."""
    return _without(flatten(to_dict(config)), marked(config, LOCAL))


def differences(before: Any, now: Config) -> list[str]:
    """List the changes that make `now` a different run than `before`, each as `key: old -> new`."""
    free = marked(now, FREE)
    old, new = flatten(to_dict(before)), flatten(to_dict(now))
    chosen = [str(each.get(f"strategy.{TARGET}", "")) for each in (old, new)]
    if chosen[0] != chosen[1] and all(target.startswith(OURS) for target in chosen):
        free.add("strategy")
    old, new = _without(old, free), _without(new, free)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in changed]


def _without(flat: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat.items()
        if not any(key == name or key.startswith(f"{name}.") for name in names)
    }
