"""Nested dicts as one level of dotted names."""

from __future__ import annotations

from typing import Any


def flatten(plain: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    if not isinstance(plain, dict):
        return {prefix: plain}
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
