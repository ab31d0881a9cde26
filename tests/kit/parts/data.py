"""Data sets with identifiable or unreadable samples."""

import os
import signal
import time
from pathlib import Path

import torch


class Tokens:
    """Samples one by one, with a random transform that uses the global generator."""

    num_classes = 3

    def __init__(self, train, noise=0.1):
        self.noise = noise if train else 0.0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index % 3)) + self.noise * torch.randn(4), index % 3


class Numbered:
    """Points whose first coordinate is the sample's number, so that a model can record its samples."""

    num_classes = 2
    input_shape = (3,)

    def __init__(self, train, size=1000):
        generator = torch.Generator().manual_seed(int(train))
        self.points = torch.cat([torch.arange(size)[:, None].float(), torch.rand(size, 2, generator=generator)], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], (self.points[index, 1:].sum() > 1).long()


class SlowToTest(Numbered):
    """Reading the test split takes a while; with `told`, a file to be made then, the process is told to stop at sample 15, once."""

    def __init__(self, train, seconds=0.05, told=None):
        super().__init__(train, size=1000 if train else 40)
        self.train, self.seconds, self.told = train, seconds, told

    def __getitem__(self, index):
        if not self.train:
            time.sleep(self.seconds)
            if self.told and index == 15 and not Path(self.told).exists():
                Path(self.told).touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


class Spoiled(Numbered):
    """Some training samples cannot be read."""

    def __init__(self, train):
        super().__init__(train)
        self.train = train

    def __getitem__(self, index):
        if self.train and index in (3, 4, 500):
            raise OSError(f"image file {index} is truncated")
        return super().__getitem__(index)


class Ledger:
    """Points in the plane, labelled by their side of a line. If LEDGER names a folder, reads are recorded there."""

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
