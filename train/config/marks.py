"""What is said of a key beside the key itself: its limits, and how far its value is free.

A key of the kit carries them in its field (keys.py), a parameter of a part in its annotation, a user's part included:

    def __init__(self, *, bucket_cap_mb: Annotated[float, Gt(0), FREE]): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le

__all__ = ["FREE", "LOCAL", "Ge", "Gt", "Le", "Mark", "not_finite", "out_of_range"]


@dataclass(frozen=True)
class Mark:
    """A word on a key."""

    name: str


FREE = Mark("free")
"""May change between two attempts at one run: where it writes, how far it goes, how it is carried out."""
LOCAL = Mark("local")
"""May differ between the ranks of one attempt: a place on the node."""


def out_of_range(key: str, value: Any, marks: Iterable[Any]) -> str | None:
    """What is wrong with a number, in one line; None if nothing is."""
    if not isinstance(value, (int, float)):
        return None
    for mark in marks:
        if isinstance(mark, Ge) and not value >= mark.ge:  # type: ignore[operator]
            return f"{key}={value} is out of range: use a value of at least {mark.ge}"
        if isinstance(mark, Gt) and not value > mark.gt:  # type: ignore[operator]
            return f"{key}={value} is out of range: use a value above {mark.gt}"
        if isinstance(mark, Le) and not value <= mark.le:  # type: ignore[operator]
            return f"{key}={value} is out of range: use a value of at most {mark.le}"
    return None


def not_finite(key: str, value: Any, *, may_be_infinite: bool = False) -> str | None:
    """What is wrong with `value`, or a value in it, that is nan or infinite; None if nothing is."""
    if isinstance(value, dict):
        return next(
            filter(
                None,
                (not_finite(f"{key}.{name}", each, may_be_infinite=may_be_infinite) for name, each in value.items()),
            ),
            None,
        )
    if isinstance(value, (list, tuple)):
        return next(filter(None, (not_finite(key, each, may_be_infinite=may_be_infinite) for each in value)), None)
    if not isinstance(value, float) or math.isfinite(value) or (may_be_infinite and math.isinf(value)):
        return None
    return f"{key}={value} is not a finite number: use one"
