"""Synthetic click data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muster.sample_plan import Keys, mix
from muster.train.data.generated import Generated


class Clicks(Generated):
    """`num_samples` lists of `list_length` out of `num_items` items, computed from `hidden_seed` and the index alone.

    The frequency of item i is about proportional to 1/(i + 1). Every item has a hidden appeal. A list is clicked if the
    appeals of its items add up to more than 0.
    """

    num_classes = 2

    def __init__(self, train: bool, *, num_samples: int, num_items: int, list_length: int, hidden_seed: int):
        super().__init__(train, num_samples=num_samples)
        self.num_items, self.input_shape, self.hidden_seed = num_items, (list_length,), hidden_seed
        self._stream = mix(np.array([hidden_seed], dtype=np.uint64))

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, K] int64` items and `[B] int64` labels, 1 if clicked."""
        samples = np.asarray(indices, dtype=np.uint64) + np.uint64(self.first)
        places = np.arange(self.input_shape[0], dtype=np.uint64)
        draws = _uniform(mix(mix(samples ^ self._stream)[:, None] ^ places))
        items = np.minimum(((self.num_items + 1.0) ** draws).astype(np.int64) - 1, self.num_items - 1)
        appeal = _uniform(mix(items.astype(np.uint64) + np.uint64(1 << 62) ^ self._stream)) - 0.5
        return torch.from_numpy(items), torch.from_numpy((appeal.sum(1) > 0).astype(np.int64))

    def fingerprint(self) -> str:
        return f"clicks:{self.num_samples}:{self.num_items}:{self.input_shape[0]}:{self.hidden_seed}"


def _uniform(words: Keys) -> np.ndarray:
    """Convert 64-bit words to numbers in [0, 1) of the same shape."""
    return (words >> np.uint64(11)).astype(np.float64) / float(1 << 53)
