"""A model with two inputs, one of which is a number of a kind."""

import random

import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __init__(self, train: bool, size: int = 64):
        self.x = torch.randn(size, 3, generator=torch.Generator().manual_seed(int(train)))
        self.num_classes = 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"points": self.x[index], "kind": index % 5, "labels": int(self.x[index].sum() > 0)}


class Net(nn.Module):
    """Counts its samples in a buffer that no state dict has."""

    def __init__(self, num_classes: int, width: int = 8):
        super().__init__()
        self.kinds, self.hidden, self.head = nn.Embedding(5, width), nn.Linear(3, width), nn.Linear(width, num_classes)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, points, kind, labels=None):
        if self.training:
            self.seen += len(points)
        return self.head(torch.tanh(self.hidden(points) + self.kinds(kind)))


class Moody(Net):
    """A program of it is wrong: it keeps the mood of the moment."""

    def forward(self, points, kind):
        return super().forward(points, kind) * random.random()


def two(batch):
    return (batch["points"], batch["kind"]), batch["labels"]
