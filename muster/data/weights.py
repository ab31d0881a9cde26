"""Weights by which samples are drawn: checked, and a digest of them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import torch

from muster.data.fingerprint import hash_of
from muster.data.stream import Stream
from muster.errors import ConfigError
from muster.sample_plan import Weights


def weights_of(given: Any, dataset: Sized, *, said: str) -> tuple[Weights, str]:
    """Return what draws the samples of `dataset`, and a digest that changes when the weights do.

    given: one number for each sample: a list, an array or a tensor `[len(dataset)]`. said: their name, for messages.
    Raises ConfigError: they do not fit the data set.
    """
    if isinstance(dataset, Stream):
        raise ConfigError(f"{said}: an IterableDataset has its own order; give a data set with __getitem__")
    try:
        found = np.asarray(torch.as_tensor(given).cpu().double().numpy())
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{said} is of type {type(given).__name__}: give a list or a tensor of numbers, one a sample"
        ) from None
    if found.shape != (len(dataset),):
        raise ConfigError(f"{said} has shape {[*found.shape]}, and there are {len(dataset)} samples: give one a sample")
    if not (np.isfinite(found).all() and (found >= 0).all() and found.any()):
        raise ConfigError(f"{said}: give finite numbers of at least 0, of which one is above 0")
    return Weights(found), hash_of([found.tobytes()])
