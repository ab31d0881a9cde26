"""Small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muster.train.models.inputs import image_shape


class ConvNet(nn.Sequential):
    """Two 3x3 convolutions with batch norm and pooling, then a linear layer. `[B, C, H, W]` to `[B, classes]`."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, width: int):
        channels, _, _ = image_shape(input_shape, model="convnet")
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            Quarters(), nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip


class Quarters(nn.Module):
    """Averages each quarter of a picture, as AdaptiveAvgPool2d(2), whose backward on CUDA is not deterministic.

    `[B, C, H, W]` to `[B, C, 2, 2]`; the quarters of an odd side share its middle.
    """

    def forward(self, pictures: Tensor) -> Tensor:
        rows, columns = (((0, (side + 1) // 2), (side // 2, side)) for side in pictures.shape[-2:])
        means = [
            pictures[..., top:bottom, left:right].mean((-2, -1)) for top, bottom in rows for left, right in columns
        ]
        return torch.stack(means, -1).view(*pictures.shape[:-2], 2, 2)
