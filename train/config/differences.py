"""What makes two configs two runs, and what ranks of one run may differ in."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from train.config.keys import GROUPS, Config, keys
from train.config.marks import FREE, LOCAL, Mark
from train.config.parts import TARGET, Part, marks
from train.flat import flatten
from train.redact import redacted_all

OURS = "train.strategies."
"""Of these strategies each goes on from the state that any other has saved."""


def to_dict(node: Any) -> Any:
    """Config as plain containers, for YAML and JSON; URLs are stripped of their secrets (train/redact.py).

    The inverse of nothing, only for reading and comparing.
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
    """The full names of all keys, parts' included, that carry `mark`."""
    own = {each.name for each in keys(config) if mark in each.marks}
    parts = [getattr(config, group) for group in GROUPS]
    return own | {key for part in parts if isinstance(part, Part) for key, said in marks(part).items() if mark in said}


def comparable(config: Config) -> dict[str, Any]:
    """What the ranks of one attempt must have in common, flat."""
    return _without(flatten(to_dict(config)), marked(config, LOCAL))


def differences(before: Any, now: Config) -> list[str]:
    """What makes `now` another run than `before`: one `key: old -> new` a difference."""
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
