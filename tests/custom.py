"""Parts of a user's own, named by import path from the tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from train.strategies.ddp import Ddp


class Stateful(nn.Sequential):
    """Dropout and batch norm: what a resume can get wrong."""

    def __init__(self, input_shape, num_classes):
        super().__init__(
            nn.Conv2d(input_shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, num_classes),
        )  # fmt: skip


class Watched(Ddp):
    """DDP that writes down a digest of its weights after every step."""

    def step(self, step, batches):
        result = super().step(step, batches)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()
        with Path(f"digests-{self.world.rank}").open("a") as file:
            file.write(json.dumps({"step": step, "digest": digest}) + "\n")
        return result


class Exploding(nn.Sequential):
    """Its gradient is not finite in the steps told, and fine in the others."""

    def __init__(self, input_shape, num_classes, bad_steps=(3,)):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))
        self.bad_steps, self.calls = set(bad_steps), 0

    def forward(self, x):
        if self.training:
            if self.calls in self.bad_steps:
                x = x * float("nan")
            self.calls += 1
        return super().forward(x)


class Crashing(nn.Linear):
    """Raises on one rank in one step."""

    def __init__(self, rank=1, at=2):
        super().__init__(64, 10)
        self.rank, self.at, self.calls = rank, at, 0

    def forward(self, x):
        import os

        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK", "0") == str(self.rank):
            raise ValueError("the user's own mistake")
        return super().forward(x.flatten(1))


class Frozen(nn.Linear):
    """Nothing to train."""

    def __init__(self):
        super().__init__(64, 10)
        self.requires_grad_(False)


class MeanSquares:
    """A loss of one's own without metrics."""

    def __call__(self, outputs, targets):
        return ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).mean()


class Tokens:
    """Samples one by one, with a random transform that uses the global generator."""

    num_classes = 3

    def __init__(self, train, noise=0.1):
        self.noise = noise if train else 0.0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index % 3)) + self.noise * torch.randn(4), index % 3
