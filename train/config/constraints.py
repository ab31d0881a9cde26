"""Marks of a key: the limits of its value, and whether it may change on resume or differ between ranks.

A key of the kit carries its marks in its field (keys.py). A parameter of a part, the kit's or a user's, carries them in
its annotation:

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
    name: str


FREE = Mark("free")
"""The value may change between attempts of a run: where it writes, how far it goes, how it is executed."""
LOCAL = Mark("local")
"""The value may differ between the ranks of an attempt, such as a path on the node."""


def out_of_range(key: str, value: Any, marks: Iterable[Any]) -> str | None:
    """Return a one-line error message if `value` is a number outside the limits in `marks`, else None."""
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
    """Return a one-line error message if `value`, or a value in it, is NaN or infinite, else None."""
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
