"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn


class Mlp(nn.Sequential):
    """Flatten, hidden layers with ReLU, and a linear output: 784-512-10 on MNIST. `[B, ...]` to `[B, classes]`."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int]):
        widths = [prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))
