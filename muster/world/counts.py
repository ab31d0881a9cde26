"""Means that are not over samples: sums and their counts by name, and what a user's `count` may return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muster.errors import ConfigError

OF = "/of"
"""Suffix of the name of a sum's own count; a sum without such a count is over samples."""
SEEN = "\0samples"
"""Name of the sum of samples, of which some may have been left out."""


def counted(found: Any, said: str, *, waits: bool = True) -> Any:
    """Return a count as a number; unless `waits`, a tensor as a float64 tensor [], NaN if it is below 0.

    said: what has returned `found`, for the message. Raises ConfigError: it is no number, or is below 0 or not finite.
    """
    is_one = (isinstance(found, Tensor) and found.numel() == 1) or isinstance(found, int | float)
    if not is_one or isinstance(found, bool):
        kind = f"{type(found).__name__}{list(found.shape) if isinstance(found, Tensor) else ''}"
        raise ConfigError(f"{said} returns {kind}: return what the mean loss is over, a number or a tensor []")
    if isinstance(found, Tensor) and not waits:
        given = found.detach().double().reshape(())
        return torch.where(given >= 0, given, math.nan)
    if not (math.isfinite(count := float(found)) and count >= 0):
        raise ConfigError(f"{said} returns {count:g}: return what the mean loss is over, a number of at least 0")
    return count


def unpaired(found: Mapping[str, Any], said: str) -> dict[str, Any]:
    """Return `found` with each pair (sum, count) as two entries, NAME and NAME/of.

    said: what has returned `found`, for the message. Raises ConfigError: a name ends with /of.
    """
    each = dict[str, Any]()
    for name, value in found.items():
        if name.endswith(OF):
            raise ConfigError(f"{said} returns the name {name}: return {name.removesuffix(OF)} as a pair, (sum, count)")
        is_pair = isinstance(value, tuple) and len(value) == 2
        each |= {name: value[0], f"{name}{OF}": value[1]} if is_pair else {name: value}
    return each


def means(sums: Mapping[str, float], *, count: float = 0.0) -> dict[str, float]:
    """Divide sums over all ranks by their own counts, or by that of samples, `SEEN` or else `count`; NaN if the count is 0."""
    samples = sums.get(SEEN, count)
    over = {name: sums.get(f"{name}{OF}", samples) for name in sums if not name.endswith(OF) and name != SEEN}
    return {name: sums[name] / of if of else math.nan for name, of in over.items()}
