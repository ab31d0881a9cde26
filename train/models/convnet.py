"""Small convolutional network with batch norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from muster.train.models.images import image_shape


class ConvNet(nn.Sequential):
    """Two 3x3 convolutions with batch norm and pooling, then a linear layer. `[B, C, H, W]` to `[B, classes]`."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, width: int):
        channels, _, _ = image_shape(input_shape, model="convnet")
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip
