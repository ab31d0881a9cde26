"""A dataset that writes down which samples each rank took for training: the ledger that the tests compare."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import torch


class Ledger:
    """Points in the plane; the target tells on which side of a line. Reads are noted, if LEDGER names a folder."""

    num_classes = 2
    input_shape = (2,)

    def __init__(self, train: bool, size: int = 101):
        self.points = torch.rand(size, 2, generator=torch.Generator().manual_seed(int(train)))
        self.train = train

    def __len__(self) -> int:
        return len(self.points)

    def fingerprint(self) -> str:
        return f"ledger:{len(self)}"  # without a read that the ledger would note

    def __getitem__(self, index: int):
        folder = os.environ.get("LEDGER")
        if folder:
            name = f"{'train' if self.train else 'test'}-{os.environ.get('RANK', '0')}"
            with (Path(folder) / name).open("a") as file:
                file.write(f"{index}\n")
        return self.points[index], (self.points[index].sum() > 1).long()


def read(folder: Path, split: str = "train") -> dict[int, list[int]]:
    """Rank -> the samples that it read, in order."""
    ledger = defaultdict(list)
    for path in folder.glob(f"{split}-*"):
        ledger[int(path.name.split("-")[1])] = [int(line) for line in path.read_text().split()]
    return dict(ledger)
