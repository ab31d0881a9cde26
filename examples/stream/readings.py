"""A stream that can only be read from its beginning and saves its position (torchdata's state_dict protocol)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset


class Readings(IterableDataset[tuple[torch.Tensor, int]]):
    """Six numbers and the sign of their sum, in a different order in each epoch; `size` samples per epoch."""

    num_classes = 2

    def __init__(self, *, train: bool, size: int):
        self.size, self.epoch, self.at = size if train else size // 5, 0, 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < self.size:
            numbers = torch.randn(6, generator=torch.Generator().manual_seed(order[self.at]))
            self.at += 1
            yield numbers, int(numbers.sum() > 0)


class Net(nn.Sequential):
    def __init__(self, *, width: int):
        super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))
