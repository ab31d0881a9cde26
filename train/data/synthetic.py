"""Synthetic images: pixel values are a hash of (sample, pixel) around a pattern of the class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muster.plan import Keys, mix
from muster.train.data.generated import Generated


class Synthetic(Generated):
    """`num_samples` images of `image_shape` (C, H, W), computed by index: any size, without memory or disk.

    Every class has a fixed random pattern. A sample is its class's pattern plus noise of equal variance, so that a
    model can learn it.
    """

    def __init__(self, train: bool, *, num_samples: int, image_shape: Sequence[int], num_classes: int):
        super().__init__(train, num_samples=num_samples)
        self.input_shape, self.num_classes = tuple(image_shape), num_classes
        self.pixels = np.arange(int(np.prod(self.input_shape)), dtype=np.uint64)
        self.patterns = self._noise(np.arange(num_classes, dtype=np.uint64) + np.uint64(1 << 62))

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, C, H, W] float32` images with unit variance and `[B] int64` labels."""
        samples = np.asarray(indices, dtype=np.uint64) + np.uint64(self.first)
        labels = (mix(samples) % np.uint64(self.num_classes)).astype(np.int64)
        images = (self.patterns[labels] + self._noise(samples)) * np.float32(0.5**0.5)
        return torch.from_numpy(images.reshape(-1, *self.input_shape)), torch.from_numpy(labels)

    def fingerprint(self) -> str:
        """Return the parameters that determine the data."""
        return f"synthetic:{self.num_samples}:{self.input_shape}:{self.num_classes}"

    def _noise(self, samples: np.ndarray) -> np.ndarray:
        """Return uniform noise of mean 0 and variance 1 for each sample and pixel: `[B, P] float32`."""
        bits = mix(mix(samples)[:, None] ^ self.pixels)
        return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)) * np.float32(
            12**0.5
        )
