"""Synthetic images: each is a sum of a few random ones, chosen by a hash of the sample's number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from muster.sample_plan import Keys, mix
from muster.train.data.generated import Generated

TERMS, CHOICES = 3, 32
"""A pattern, and a noise, is a sum of so many random images, each one of so many: 2^15 different ones."""
FIRST = np.uint64(1 << 62)  # no sample has the number of a random image
SPREAD = 0x5851  # odd, so that each class has a pattern of its own


class Synthetic(Generated):
    """`num_samples` images of `image_shape` (C, H, W), computed by index: any number, without a disk.

    Every class has a fixed random pattern. A sample is its class's pattern plus noise of equal variance, so that a
    model can learn it. A core computes some 500 images of 224 by 224 pixels a second; of many, some are equal.
    """

    def __init__(self, train: bool, *, num_samples: int, image_shape: Sequence[int], num_classes: int):
        super().__init__(train, num_samples=num_samples)
        self.input_shape, self.num_classes = tuple(image_shape), num_classes
        self.pixels = int(np.prod(self.input_shape))
        _random_images(self.pixels)  # once, before loader workers are forked

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, C, H, W] float32` images with unit variance and `[B] int64` labels."""
        samples = np.asarray(indices, dtype=np.uint64) + np.uint64(self.first)
        labels = mix(samples) % np.uint64(self.num_classes)
        terms = np.concatenate([chosen(labels * np.uint64(SPREAD)), chosen(mix(mix(samples)))], axis=1)
        images = embedding_bag(torch.from_numpy(terms), _random_images(self.pixels), mode="sum")
        return images.view(-1, *self.input_shape), torch.from_numpy(labels.astype(np.int64))

    def fingerprint(self) -> str:
        return f"synthetic:{self.num_samples}:{self.input_shape}:{self.num_classes}:{TERMS}:{CHOICES}"


def chosen(words: np.ndarray) -> np.ndarray:
    """Return which random images the low bits of each word choose: `[B, TERMS] int64`."""
    parts = [words // np.uint64(CHOICES**term) % np.uint64(CHOICES) for term in range(TERMS)]
    return np.stack([part.astype(np.int64) + term * CHOICES for term, part in enumerate(parts)], axis=1)


@lru_cache(maxsize=2)
def _random_images(pixels: int) -> Tensor:
    """Return uniform noise of mean 0, so that a sample's sum of it has variance 1: `[TERMS * CHOICES, pixels] float32`."""
    numbers = mix(np.arange(TERMS * CHOICES, dtype=np.uint64) + FIRST)
    images = torch.empty(len(numbers), pixels)
    scale = np.float32((12 / (2 * TERMS)) ** 0.5)
    for image, number in zip(images, numbers, strict=True):
        bits = mix(np.arange(pixels, dtype=np.uint64) ^ number) >> np.uint64(40)
        image.copy_(torch.from_numpy((bits.astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)) * scale))
    return images
