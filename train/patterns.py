"""Patterns of dotted names, as users give them for parameters."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns, lies in a module that is, or fits one with `*`."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)
