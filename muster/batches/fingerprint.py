"""Fingerprint of a dataset: a string that changes when the data does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from muster.batches.generators import kept_generators, seed_generators

LOOKED_AT = 8
DRAWN = "drawn"
"""In place of a hash if a sample differs from itself, because its transforms draw from a generator of their own."""


def fingerprint(dataset: Any) -> str:
    """Return the dataset's own `fingerprint()`, or its length and a hash of a few of its samples.

    The global generators are unchanged.
    """
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    count = len(dataset)
    chosen = [*dict.fromkeys(position * (count - 1) // (LOOKED_AT - 1) for position in range(LOOKED_AT))]
    with kept_generators():
        first, second = ([_look(dataset, index) for index in chosen] for _ in range(2))
    return f"{count}:{hash_of(first) if first == second else DRAWN}"


def _look(dataset: Any, index: int) -> Any:
    seed_generators(0)  # makes random transforms reproducible
    try:
        return look(dataset[index])
    except Exception:  # the loader handles samples that cannot be read
        return "unreadable"


def look(sample: Any) -> list[Any]:
    """Return the parts of a sample that are the same in every process."""
    return [_value(leaf) for leaf in pytree.tree_leaves(sample)]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return leaf if isinstance(leaf, (bool, int, float, str, bytes)) else type(leaf).__name__  # no addresses


def hash_of(items: Iterable[Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of all `items`, in order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]
