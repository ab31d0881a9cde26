"""What a user's own torchmetrics class keeps beside the states that it declares, which alone are put together over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def undeclared(metric: Any) -> dict[str, Any]:
    """Return copies of what a user's own torchmetrics class keeps and has not declared: what counts, in any container."""
    declared = getattr(metric, "_defaults", None)
    if (
        not isinstance(declared, dict)
        or not hasattr(metric, "sync")
        or type(metric).__module__.startswith("torchmetrics.")
    ):
        return {}
    kept = {key: value for key, value in vars(metric).items() if key not in declared and key not in _of_every_metric()}
    return {key: _copied(value) for key, value in kept.items() if _counts(value)}


def _counts(value: Any) -> bool:
    if isinstance(value, list | tuple | set | deque | Mapping):
        return not isinstance(value, tuple) or bool(value)
    return isinstance(value, int | float | Tensor | np.ndarray | np.number) and not isinstance(value, bool)


def _copied(value: Any) -> Any:
    """Return a copy down to tensors and arrays, without their history; what is neither stays itself."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_copied(each) for each in value]
    return set(value) if isinstance(value, set) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return type(one) is type(other) and one.shape == other.shape and bool(torch.as_tensor(one == other).all())
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # an object of the user's own
        return one is other


@cache
def _of_every_metric() -> frozenset[str]:
    """Return the names of what torchmetrics itself keeps in a metric."""
    from torchmetrics import SumMetric

    kept = SumMetric()
    kept.update(torch.ones(1))  # not compute, which communicates
    return frozenset(vars(kept))
