"""Your data and your model: the trainer calls them by their import path, `mine.Points` and `mine.Net`."""

import torch


class Points(torch.utils.data.TensorDataset):
    """Points in the plane, labelled by the sign of x times y. `train` chooses the split."""

    def __init__(self, train: bool, size: int = 4096):
        x = torch.randn(size, 2, generator=torch.Generator().manual_seed(int(train)))
        super().__init__(x, (x[:, 0] * x[:, 1] > 0).long())


class Net(torch.nn.Sequential):
    """A small classifier. Its parameters are keys: `+model.width=64`."""

    def __init__(self, width: int = 16):
        super().__init__(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
