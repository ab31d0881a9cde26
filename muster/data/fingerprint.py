"""Fingerprint of a dataset: a string that changes when the data does."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from muster.data.draw_detection import Looks, Watch
from muster.data.generators import kept_generators, seed_generators
from muster.data.own_generators import OwnGenerators
from muster.tensor_bytes import as_bytes

LOOKED_AT = 8
BEGINS_PATH = re.compile(r"[/\\~]|\.\.?[/\\]|[A-Za-z]:[/\\]|\w+://")
DRAWN = "drawn"
"""In place of a hash if a sample differs from itself, because it draws from a generator that is not seen."""
OWN_DRAWS = (
    "the data set draws from a generator that is not seen, or takes a state of the global ones unseen: a resumed run, or a rank that is "
    "restarted in place, draws other numbers, as does each rank; draw from an attribute of the data set (self.rng = np.random.default_rng()) or from "
    "the global generators of torch, NumPy or Python, which are seeded for each sample"
)


def note_of(fingerprint: str) -> str:
    """Return the warning for data with this fingerprint; empty if there is none."""
    return OWN_DRAWS if fingerprint.endswith(DRAWN) else ""


def fingerprint(dataset: Any, *, most: int = LOOKED_AT, paths: bool = True) -> str:
    """Return the dataset's own `fingerprint()`, or its length and a hash of a few samples. The global generators are unchanged.

    most: number of samples, 2 or more. paths: False looks at the last part alone of texts that may be paths, whose folders are a node's own.
    """
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    count = len(dataset)
    chosen = [*dict.fromkeys(position * (count - 1) // (most - 1) for position in range(most))]
    own = OwnGenerators(dataset)
    before = own.states()
    with kept_generators():
        first, have_drawn = zip(*(_look(dataset, index, own) for index in chosen), strict=True)
        key = 0 if any(have_drawn) else 1  # what does not draw, as far as can be seen, must not depend on a state
        second, _ = zip(*(_look(dataset, index, own, key=key) for index in chosen), strict=True)
        if first != second and not key:  # the first sample may have created the generator
            first, _ = zip(*(_look(dataset, index, own) for index in chosen), strict=True)
    own.restore(before)
    if first != second:
        return f"{count}:{DRAWN}"
    return f"{count}:{hash_of(first if paths else _without_folders(first))}"


def _without_folders(samples: Iterable[Iterable[Any]]) -> list[list[Any]]:
    return [
        [_name(part) if isinstance(part, str) and _may_be_path(part) else part for part in sample] for sample in samples
    ]


def _may_be_path(text: str) -> bool:
    return bool(BEGINS_PATH.match(text)) or not any(map(str.isspace, text))


def _name(path: str) -> str:
    """Return the last part; sentences and formulas without blanks, which have one as well, differ in it."""
    return next((part for part in reversed(re.split(r"[/\\]", path)) if part), "")


def _look(dataset: Any, index: int, own: OwnGenerators, *, key: int = 0) -> tuple[Any, bool]:
    """Return what is seen of a sample, and whether it has drawn from a generator that is known."""
    seed_generators(key)  # makes random transforms reproducible
    own.seed(key)
    watch, before = Watch(), own.states()
    try:
        with Looks() as looks:
            sample = dataset[index]
        return look(sample), looks.seen or bool(watch.drawn()) or own.have_drawn(before)
    except Exception:  # the loader handles samples that cannot be read
        return "unreadable", True


def look(sample: Any) -> list[Any]:
    """Return the parts of a sample that are the same in every process."""
    return [_value(leaf) for leaf in pytree.tree_leaves(sample)]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return bytes(as_bytes(leaf.detach().cpu()))
    if isinstance(leaf, (bool, int, float, str, bytes)):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__array_interface__"):  # as PIL's images have
        return _of_array(np.asarray(leaf))
    return type(leaf).__name__  # no addresses


def _of_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.names:  # there may be anything between two fields
        return [_of_array(array[name]) for name in array.dtype.names]
    if array.dtype.kind in "US":
        return str(array.tolist())
    return "object" if array.dtype.hasobject else hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()


def hash_of(items: Iterable[Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of all `items`, in order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]
