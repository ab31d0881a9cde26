"""A data set and a model, as in a project that has Muster installed."""

import torch
from torch import nn


class Points(torch.utils.data.TensorDataset):
    """Points in the plane, of class 1 where both coordinates have the same sign."""

    num_classes = 2

    def __init__(self, *, train: bool, size: int):
        points = torch.randn(size if train else size // 5, 2, generator=torch.Generator().manual_seed(int(train)))
        super().__init__(points, (points[:, 0] * points[:, 1] > 0).long())


class Net(nn.Sequential):
    """One hidden layer of `width` units."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int, width: int):
        super().__init__(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, num_classes))
