"""Custom parts: samples of other shapes, models with several inputs, streams, mistakes."""

import itertools
import os
import random
import time

import numpy as np
import torch
from torch import nn


class Dicts(torch.utils.data.Dataset):
    """Dict samples, of which the model takes two entries by name."""

    num_classes = 2

    def __init__(self, *, train: bool, more: bool = False):
        self.size, self.more = 128 if train else 40, more

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        left, right = torch.randn(2, 3, generator=torch.Generator().manual_seed(index))
        sample = {"left": left, "right": right, "labels": int((left + right).sum() > 0)}
        return {**sample, "index": index} if self.more else sample


class Triples(Dicts):
    def __getitem__(self, index):
        return tuple(super().__getitem__(index).values())


class Bare(Dicts):
    def __getitem__(self, index):
        return super().__getitem__(index)["left"][:2]


class Pairs(Dicts):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {name: sample[name] for name in ("left", "right")}, sample["labels"]


class Ragged(Dicts):
    """Samples of different lengths, which need a collate function."""

    def __getitem__(self, index):
        return torch.ones(1 + index % 3), index % 2


class Two(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) + self.right(right)))


def split(batch):
    return (batch[0], batch[1]), batch[2]


def keep_three(batch):
    return batch


def pad(samples):
    return nn.utils.rnn.pad_sequence(
        [sample[0] for sample in samples], batch_first=True, padding_value=0.0
    ), torch.tensor([sample[1] for sample in samples])


class Length(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, padded):
        return self.head(padded.sum(1, keepdim=True))


class Numbers(torch.utils.data.IterableDataset):
    """A stream without a state. ends: stop before its length. more: samples after its length."""

    num_classes = 2

    def __init__(self, *, train: bool, ends: int | None = None, more: int = 0, known: bool = True):
        self.size, self.ends, self.more, self.epoch, self.known = (
            100 if train else 20,
            ends,
            more if train else 0,
            0,
            known,
        )

    def __len__(self):
        if not self.known:
            raise TypeError
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        size, generator = self.size + self.more, torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(size, generator=generator).tolist()[: self.ends]:
            numbers = torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.01 * torch.rand(1)
            yield numbers, int(numbers.sum() > 0)


class Divided(Numbers):
    """A stream that divides itself by worker, as torch's documentation shows."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return itertools.islice(
            super().__iter__(), worker.id if worker else 0, None, worker.num_workers if worker else 1
        )


class Counted(Numbers):
    """The numbers from 0 on, in their order."""

    def __init__(self, more: int):
        super().__init__(train=True, more=more)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(range(worker.id if worker else 0, self.size + self.more, worker.num_workers if worker else 1))


class Stateful(Numbers):
    """A stream with a state, which counts its reads."""

    def __init__(self, *, train: bool):
        super().__init__(train=train)
        self.at, self.read = 0, 0

    def set_epoch(self, epoch):
        self.epoch, self.at = epoch, 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < self.size:
            numbers = torch.randn(6, generator=torch.Generator().manual_seed(order[self.at]))
            self.at, self.read = self.at + 1, self.read + 1
            yield numbers, int(numbers.sum() > 0)


class Labels(torch.utils.data.TensorDataset):
    num_classes = 2

    def __init__(self, *, train: bool, kind: str):
        labels = {"far": torch.full((64,), 7), "wide": torch.zeros(64, 3).long(), "float": torch.zeros(64)}
        super().__init__(torch.randn(64, 6), labels.get(kind, torch.zeros(64).long()))
        self.kind = kind

    def __getitem__(self, index):
        if self.kind == "broken":
            raise ValueError("cannot parse line 7")
        return super().__getitem__(index)


class Unused(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.used, self.unused = nn.Linear(6, num_classes), nn.Linear(6, num_classes)

    def forward(self, inputs):
        return self.used(inputs)


class Buggy(nn.Module):
    """Raises at the same place in every attempt."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.head, self.calls = nn.Linear(64, num_classes), 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls > 3:
            raise AttributeError("no such thing")
        return self.head(inputs.flatten(1))


def squared(outputs, targets):
    return ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).mean()


def halve(step):
    return 0.5**step


def factory(named_parameters, lr: float):
    """Return an optimizer built from named parameters."""
    groups = [{"params": [p for _, p in named_parameters], "names": [name for name, _ in named_parameters]}]
    return torch.optim.SGD(groups, lr=lr)


class Late(nn.Module):
    """Rank 1 takes LATE_S longer for each batch."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, inputs):
        if self.training and os.environ.get("RANK") == "1":
            time.sleep(float(os.environ["LATE_S"]))
        return self.head(inputs.flatten(1))


class SlowDisk(torch.utils.data.Dataset):
    """Rank 2 takes LATE_S longer to read a sample."""

    num_classes = 10

    def __init__(self, *, train: bool):
        self.size = 960 if train else 32

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if os.environ.get("RANK") == "2":
            time.sleep(float(os.environ["LATE_S"]))
        return torch.full((64,), index / 960), index % 10


class Drawing(torch.utils.data.Dataset):
    """Samples with noise from a generator of their own, in an attribute; `late`: made by the first sample."""

    num_classes = 2

    def __init__(self, *, kind: str, train: bool = True):
        self.kind, self.rng = kind, None if kind == "late" else self.made(kind)

    def made(self, kind):
        seeded = {"random": random.Random, "torch": torch.Generator().manual_seed, "old": np.random.RandomState}
        return seeded.get(kind, np.random.default_rng)(0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.rng = self.rng or self.made(self.kind)
        noise = (
            torch.rand((), generator=self.rng)
            if self.kind == "torch"
            else torch.tensor(self.rng.normalvariate(0, 1) if self.kind == "random" else self.rng.normal())
        )
        return torch.full((6,), index / 40) + noise.float(), index % 2


class Weighted(Drawing):
    """Samples that are drawn by weights, of which every fourth is 0."""

    def __init__(self, *, train: bool = True):
        super().__init__(kind="late")
        self.sample_weights = [index % int(os.environ.get("MODULUS", "4")) for index in range(40)]


class Misweighted(Drawing):
    """Weights of classes, not of samples."""

    sample_weights = (1.0, 3.0)

    def __init__(self, *, train: bool = True):
        super().__init__(kind="late")


class Compiling(Two):
    """A model of which a layer is compiled where COMPILED is set, by a backend that needs no compiler."""

    def __init__(self):
        super().__init__()
        if "COMPILED" in os.environ:
            self.left = torch.compile(self.left, backend="eager")
