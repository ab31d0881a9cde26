"""The models and data of `bench.loop`, alike for all trainers. The clock sits in the model: a trainer need not know of it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from muster.sample_plan import Keys

SAMPLES = 10_000
CLOCK = "BENCH_CLOCK"
"""Environment variable with the file to which rank 0 writes the time of each step's forward pass, as 64-bit numbers."""


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    shape: of a sample. classes: number of labels or tokens. batch: samples per rank and step. objective: the kit's.
    """

    said: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    objective: str = "classification"


WORKLOADS = {
    "W1": Workload("mlp 784-512-10, 64 a rank", (1, 28, 28), 10, 64),
    "W2": Workload("resnet18, 3x32x32, 32 a rank", (3, 32, 32), 10, 32),
    "W3": Workload("gpt, 4 layers, width 128, 128 tokens, 8 a rank", (128,), 256, 8, "language_modeling"),
}


def model(name: str) -> nn.Module:
    """Return the model of a workload, with the clock in it."""
    from muster.train.models.gpt import Gpt
    from muster.train.models.mlp import Mlp
    from muster.train.models.resnet import resnet18

    builders: dict[str, Any] = {
        "W1": partial(Mlp, hidden=[512]),
        "W2": resnet18,
        "W3": partial(Gpt, num_layers=4, num_heads=4, hidden_dim=128, dropout=0.0),
    }
    workload = WORKLOADS[name]
    made: nn.Module = builders[name](input_shape=workload.shape, num_classes=workload.classes)
    if CLOCK in os.environ and os.environ.get("RANK", "0") == "0":
        made.register_forward_pre_hook(Clock(os.environ[CLOCK]))
    return made


class Clock:
    """Notes the time of each forward pass that trains."""

    def __init__(self, path: str):
        with open(path, "r+b") as file:
            self.times = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self.passed = 0

    def __call__(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.times[self.passed] = time.monotonic()
            self.passed += 1


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


class Plain(Dataset[Any]):
    """Tensors in memory, uint8 images and labels, or tokens and next tokens: as most data sets, one sample at a time."""

    collate: Any = None

    def __init__(self, of: str):
        workload = WORKLOADS[of]
        self.num_classes, self.is_text = workload.classes, len(workload.shape) == 1
        size, same = (SAMPLES, *workload.shape), torch.Generator().manual_seed(0)  # on each rank
        largest = workload.classes if self.is_text else 256
        self.inputs = torch.randint(0, largest, size, dtype=torch.uint8, generator=same)
        self.labels = torch.randint(0, workload.classes, size if self.is_text else size[:1], generator=same)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        return inputs.long() if self.is_text else inputs.float() / 255, self.labels[index]


class Batched(Plain):
    """Reads samples together by torch's `__getitems__`, as `Subset` and Hugging Face's data sets do."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self[indices], strict=True))


class Keyed(Plain):
    """Gives a whole batch by the kit's `__getitems__`; for the other loops the collate function does nothing."""

    collate = staticmethod(lambda batch: batch)

    def __getitems__(self, indices: Sequence[int] | Tensor, keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        return self[indices]


class Random(Plain):
    """Draws for each sample, as random augmentation does: a flip of images and a shift, or dropped tokens."""

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = super().__getitem__(index)
        if self.is_text:
            return inputs.masked_fill(torch.rand(inputs.shape) < 0.1, 0), labels
        inputs = inputs.flip(-1) if torch.rand(()) < 0.5 else inputs
        return inputs.roll(int(torch.randint(-2, 3, ())), -1), labels


KINDS: dict[str, type[Plain]] = {"plain": Plain, "batched": Batched, "keyed": Keyed, "random": Random}
