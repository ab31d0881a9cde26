"""A word that changes when the data does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from train.data.generators import kept_generators, seed_generators

LOOKED_AT = 8


def fingerprint(dataset: Any) -> str:
    """As the dataset itself says (`fingerprint()`); of one that says nothing, its length and a few of its samples."""
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    count = len(dataset)
    chosen = [position * (count - 1) // (LOOKED_AT - 1) for position in range(LOOKED_AT)]
    with kept_generators():
        return f"{count}:{hash_of(_look(dataset, index) for index in dict.fromkeys(chosen))}"


def _look(dataset: Any, index: int) -> Any:
    seed_generators(0)  # a random transform then gives the same each time
    try:
        return look(dataset[index])
    except Exception:  # a sample that cannot be read is for the loader to judge
        return "unreadable"


def look(sample: Any) -> list[Any]:
    """What of a sample is the same in every process."""
    return [_value(leaf) for leaf in pytree.tree_leaves(sample)]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return leaf if isinstance(leaf, (bool, int, float, str, bytes)) else type(leaf).__name__  # no addresses


def hash_of(items: Iterable[Any]) -> str:
    """The start of the SHA-256 of all `items`, in their order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]
