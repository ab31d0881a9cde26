"""What is said of a key beside the key itself: its limits, and how far its value is free.

A key of the kit carries them in its field (keys.py), a parameter of a part in its annotation, a user's part included:

    def __init__(self, *, bucket_cap_mb: Annotated[float, Gt(0), FREE]): ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt

__all__ = ["FREE", "LOCAL", "Ge", "Gt", "Mark", "out_of_range"]


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
    for mark in marks:
        if isinstance(value, (int, float)) and isinstance(mark, Ge) and not value >= mark.ge:  # type: ignore[operator]
            return f"{key}={value:g} is out of range: use a value of at least {mark.ge:g}"
        if isinstance(value, (int, float)) and isinstance(mark, Gt) and not value > mark.gt:  # type: ignore[operator]
            return f"{key}={value:g} is out of range: use a value above {mark.gt:g}"
    return None
