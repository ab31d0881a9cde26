"""Base class of image datasets held in memory, and their augmentation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from muster.data.fingerprint import hash_of
from muster.errors import DataError
from muster.sample_plan import Keys, mix


class Images:
    """Images held in memory as `[N, C, H, W] uint8`, gathered and normalized one micro-batch at a time."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float], shift: int, flip: bool
    ):
        self.images, self.labels = images, labels.long()
        self._scaled_by = tuple(mean), tuple(std)
        self.offset, self.scale = offset_and_scale(*self._scaled_by, torch.device("cpu"))
        self.shift, self.flip, self.is_compact = shift, flip, False
        self.input_shape = tuple(images.shape[1:])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, C, H, W] float32` normalized images, shifted and flipped by key, and `[B] int64` labels."""
        chosen = torch.as_tensor(indices)
        images, fill = self.images.index_select(0, chosen), torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        if not self.is_compact:
            images, fill = self.expand(images), self.offset
        if keys is not None and (self.shift or self.flip):
            images = shift_and_flip(images, keys, shift=self.shift, flip=self.flip, fill=fill)
        return images, self.labels.index_select(0, chosen)

    def compact(self) -> Images:
        other = copy.copy(self)
        other.is_compact = True
        return other

    def expand(self, images: Tensor) -> Tensor:
        """Return `[B, C, H, W] uint8` images as normalized float32, on their device."""
        offset, scale = offset_and_scale(*self._scaled_by, images.device)
        return torch.addcmul(offset, images.float(), scale)

    def fingerprint(self) -> str:
        return f"{len(self)}:{hash_of([self.images.numpy().tobytes(), self.labels.numpy().tobytes()])}"


@cache  # a copy from memory that is not pinned would wait for the device, for each batch
def offset_and_scale(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what normalizes pixels from 0 to 255, offset + pixel * scale: `[1, C, 1, 1] float32` each, on `device`."""
    offset, scale = -torch.tensor(mean) / torch.tensor(std), 1 / (255 * torch.tensor(std))
    return offset.view(1, -1, 1, 1).to(device), scale.view(1, -1, 1, 1).to(device)


def shift_and_flip(images: Tensor, keys: Keys, *, shift: int, flip: bool, fill: Tensor) -> Tensor:
    """Crop each padded image at a random offset, then flip it horizontally with probability 1/2: `[B, C, H, W]`.

    The crop and flip of Krizhevsky's CIFAR nets and of He et al., "Deep Residual Learning", 2015, section 4.2.
    """
    count, channels, height, width = images.shape
    span = np.uint64(2 * shift + 1)
    down = torch.from_numpy((mix(keys) % span).astype(np.int64))
    right = torch.from_numpy((mix(keys ^ np.uint64(1)) % span).astype(np.int64))
    mirrored = torch.from_numpy((mix(keys ^ np.uint64(2)) % np.uint64(2)).astype(bool)) & flip
    padded = fill.expand(count, channels, height + 2 * shift, width + 2 * shift).clone()
    padded[:, :, shift : shift + height, shift : shift + width] = images
    rows = down[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = right[:, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in mode RGB; one of 16 bits is scaled, where `convert` would cut its values off at 255.

    Raises ValueError: nothing says what range its values have.
    """
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) // 257).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError(f"its pixels are of PIL's mode {picture.mode}, whose range nothing says: store 8 or 16 bits")
    return picture.convert("RGB")


def read_rgb(path: str) -> Image.Image:
    """Return the picture in a file in mode RGB. Raises OSError, SyntaxError, ValueError."""
    with Image.open(path) as picture:
        return rgb(picture)


def download(fetch: Any, what: str) -> None:
    """Call `fetch`. Raises DataError, which says which files to place where instead, if it fails."""
    try:
        fetch()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(": ") if str(error).strip() else type(error).__name__
        raise DataError(f"download failed ({reason}): place {what}, or set data.root to where it is") from error
