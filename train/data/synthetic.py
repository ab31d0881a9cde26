"""Synthetic images: pixel values are a hash of (sample, pixel) around a pattern of the class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from muster.plan import Keys, mix
from muster.train.data.generated import Generated


class Synthetic(Generated):
    """`num_samples` images of `image_shape` (C, H, W), computed by index: any size, without memory or disk.

    Every class has a fixed random pattern. A sample is its class's pattern plus noise of equal variance, so that a
    model can learn it.

    pool: compute only so many images, when the first of them is needed, and repeat them with their labels: reading a
        sample is then a copy. None: each sample is another image, which takes about 30 ms at 224 by 224 pixels.
    """

    def __init__(
        self,
        train: bool,
        *,
        num_samples: int,
        image_shape: Sequence[int],
        num_classes: int,
        pool: Annotated[int, Ge(1)] | None,
    ):
        super().__init__(train, num_samples=num_samples)
        self.input_shape, self.num_classes = tuple(image_shape), num_classes
        self.pool = pool
        self._pooled: tuple[Tensor, Tensor] | None = None
        self.pixels = np.arange(int(np.prod(self.input_shape)), dtype=np.uint64)
        self.patterns = self._noise(np.arange(num_classes, dtype=np.uint64) + np.uint64(1 << 62))

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, C, H, W] float32` images with unit variance and `[B] int64` labels."""
        if self.pool:
            chosen = torch.as_tensor(indices) % self.pool
            images, labels = self._repeated(self.pool)
            return images.index_select(0, chosen), labels.index_select(0, chosen)
        return self._computed(np.asarray(indices, dtype=np.uint64))

    def _repeated(self, number: int) -> tuple[Tensor, Tensor]:
        if self._pooled is None:
            self._pooled = self._computed(np.arange(number, dtype=np.uint64))
        return self._pooled

    def _computed(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        samples = indices + np.uint64(self.first)
        labels = (mix(samples) % np.uint64(self.num_classes)).astype(np.int64)
        images = (self.patterns[labels] + self._noise(samples)) * np.float32(0.5**0.5)
        return torch.from_numpy(images.reshape(-1, *self.input_shape)), torch.from_numpy(labels)

    def fingerprint(self) -> str:
        """Return the parameters that determine the data."""
        return f"synthetic:{self.num_samples}:{self.input_shape}:{self.num_classes}{f':pool={self.pool}' if self.pool else ''}"

    def _noise(self, samples: np.ndarray) -> np.ndarray:
        """Return uniform noise of mean 0 and variance 1 for each sample and pixel: `[B, P] float32`."""
        bits = mix(mix(samples)[:, None] ^ self.pixels)
        return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)) * np.float32(
            12**0.5
        )
