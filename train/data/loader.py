"""From the plan to micro-batches on the device: which samples is the plan's affair, how they get here is this room's."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from train.component import arguments, build, locate, signature
from train.config import Config
from train.data.images import hash_of
from train.errors import DataError
from train.plan import Keys, MicroBatch, Plan, sample_keys
from train.world import World


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device. `count` of its samples count (see plan.MicroBatch), out of `total` in the step."""

    inputs: Any
    targets: Any
    count: int
    total: int


@dataclass(frozen=True)
class Data:
    """The training and the test split, and what a model has to know of them."""

    train: Any
    test: Any | None
    input_shape: tuple[int, ...]
    num_classes: int | None
    fingerprint: str


def load(config: Config, world: World) -> Data:
    """Build both splits; downloads run on one rank of each node while the others wait. Collective.

    Raises:
        DataError: on every rank, if the data cannot be had on any.
    """
    failure: DataError | None = None
    try:
        target = locate(config.data, key="data")
        kwargs = arguments(config.data, target, key="data")
        if hasattr(target, "prepare") or kwargs.get("download"):
            with world.local_first():
                if world.place.local_rank == 0:
                    target.prepare(**kwargs) if hasattr(target, "prepare") else _split(config, train=True)
        train = _split(config, train=True)
        test = _split(config, train=False) if "train" in signature(target) else None
        if not len(train):
            raise DataError(f"{config.data._target_} has no training samples")
    except DataError as error:
        failure = error
    except OSError as error:
        failure = DataError(
            f"cannot read {error.filename or config.data._target_}: {error.strerror or error}; set data.root to where the data is"
        )
    world.together(failure)
    shape = getattr(train, "input_shape", None) or tuple(torch.as_tensor(train[0][0]).shape)
    classes = getattr(train, "num_classes", None) or (len(train.classes) if hasattr(train, "classes") else None)
    return Data(train, test, tuple(shape), classes, fingerprint(train))


def _split(config: Config, *, train: bool) -> Any:
    return build(config.data, key="data", train=train)


def fingerprint(dataset: Any) -> str:
    """Changes when the data does, as the dataset itself says; of one that says nothing, the length."""
    if hasattr(dataset, "fingerprint"):
        return str(dataset.fingerprint())
    if hasattr(dataset, "images"):
        return f"{len(dataset)}:{hash_of([dataset.images.numpy().tobytes(), dataset.labels.numpy().tobytes()])}"
    return str(len(dataset))


class Fetch(Dataset[Any]):
    """Turns a plan's micro-batch into tensors; runs in the training process or in a DataLoader worker."""

    def __init__(self, dataset: Any, *, seed: int, augment: bool):
        self.dataset, self.seed, self.augment = dataset, seed, augment

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[Any, Any, int]:
        keys = sample_keys(seed=self.seed, epoch=micro_batch.epoch, indices=micro_batch.indices)
        if not hasattr(self.dataset, "__getitems__"):
            return *self._one_by_one(micro_batch, keys), micro_batch.count
        batch = self.dataset.__getitems__(micro_batch.indices.tolist())
        if isinstance(batch, list):  # samples, as torch.utils.data's own protocol has it
            batch = default_collate(batch)
        if self.augment and hasattr(self.dataset, "augment"):
            batch = self.dataset.augment(tuple(batch), keys)
        return batch[0], batch[1], micro_batch.count

    def _one_by_one(self, micro_batch: MicroBatch, keys: Keys) -> tuple[Any, Any]:
        """Seed the global generators for each sample, so that random transforms depend on nothing but its key."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        samples = []
        for index, key in zip(micro_batch.indices.tolist(), keys.tolist(), strict=True):
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            torch.default_generator.manual_seed(key)
            samples.append(self.dataset[index])
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        inputs, targets = default_collate(samples)[:2]
        return inputs, targets


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    # torchrun signals the whole process group: a worker that dies of SIGTERM takes the last checkpoint with it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def batches(
    dataset: Any,
    plan: Plan,
    *,
    steps: range,
    shard: tuple[int, int],
    micro_batch_size: int | None,
    num_workers: int,
    seed: int,
    augment: bool,
    device: torch.device,
) -> Iterator[list[Batch]]:
    """For each step its micro-batches for shard `(rank, size)`, on the device.

    One loader serves the whole range, across epochs: its workers are started once, and nothing stalls at a boundary.
    """
    rank, size = shard
    shares = (plan.share(step, rank=rank, world_size=size, micro_batch_size=micro_batch_size) for step in steps)
    loader = DataLoader(
        Fetch(dataset, seed=seed, augment=augment),
        batch_sampler=(micro for share in shares for micro in share),  # type: ignore[misc]
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or it would draw from the global one, which a resumed run has to find untouched
    )
    fetched = iter(loader)
    for step in steps:
        total = plan.count(step)
        yield [
            Batch(to(device, inputs), to(device, targets), count, total)
            for inputs, targets, count in islice(
                fetched, plan.pieces(step, world_size=size, micro_batch_size=micro_batch_size)
            )
        ]


def to(device: torch.device, value: Any) -> Any:
    """Move tensors, alone or in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to(device, item) for key, item in value.items()}
    return type(value)(to(device, item) for item in value) if isinstance(value, (tuple, list)) else value
