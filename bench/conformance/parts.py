"""The data and the model that every trainer uses: numbered samples, and a model that records its inputs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench.conformance.ledger import write

SAMPLES, BATCH, EPOCHS = 400, 16, 6
"""`BATCH` samples a step over the whole world; it divides `SAMPLES`, so no trainer has to pad or drop any."""
STEPS_PER_EPOCH = SAMPLES // BATCH
SAVE_EVERY, KEEP = 10, 3
LR = 1e-3
HOLD = Path(os.environ.get("LEDGER", "."), "hold")
"""While this file is there, steps take longer: a second launch comes in time, however slow the machine."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points in the plane, labelled by their side of a line. `inputs [3] float32` start with the sample's number."""

    num_classes = 2
    input_shape = (3,)

    def __init__(self, train: bool = True):
        size = SAMPLES if train else BATCH
        places = torch.rand(size, 2, generator=torch.Generator().manual_seed(int(train)))
        self.inputs = torch.cat([torch.arange(size)[:, None].float(), places], 1)
        self.targets = (places.sum(1) > 1).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def fingerprint(self) -> str:
        return f"points:{len(self)}"


class Net(nn.Module):
    """A classifier with dropout, whose training steps take at least `delay_s`.

    `steps` is saved and restored with the weights, so the ledger shows the true step of the weights, independent of the
    trainer's own count. Samples are recorded here and not in the data set, because loader workers read ahead.
    """

    steps: Tensor

    def __init__(self, width: int = 128, delay_s: float = 0.03):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.delay_s = delay_s

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs [B, 3] float32` to logits `[B, 2]`."""
        if self.training:
            write(step=int(self.steps), samples=inputs[:, 0].int().tolist())
            self.steps += 1
            time.sleep(self.delay_s)
            while HOLD.exists():
                time.sleep(0.01)
        logits: Tensor = self.layers(inputs[:, 1:])
        return logits


def batch_of_rank() -> int:
    """Return the samples per step for each rank, at any world size."""
    return BATCH // int(os.environ.get("WORLD_SIZE", "1"))
