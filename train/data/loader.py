"""From the plan to micro-batches on the device: which samples is the plan's affair, how they get here is this room's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from train.config.parts import arguments, build, locate, signature
from train.config.schema import Config
from train.data.images import hash_of
from train.dist.world import World
from train.errors import ConfigError, DataError, say
from train.plan import Keys, MicroBatch, Plan, sample_keys


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
    """Build both splits; downloads run on one rank of those that see the same folder while the others wait. Collective.

    Raises:
        DataError: on every rank, if the data cannot be had on any.
    """
    failure: DataError | None = None
    try:
        target = locate(config.data, key="data")
        kwargs = arguments(config.data, target, key="data")
        if hasattr(target, "prepare") or kwargs.get("download"):
            with world.local_first(kwargs.get("root")) as goes_first:
                if goes_first:
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
    digest = fingerprint(train)
    world.same("training data: fingerprint", digest, remedy="give every node the same data, see data.root")
    shape = getattr(train, "input_shape", None) or tuple(torch.as_tensor(train[0][0]).shape)
    classes = getattr(train, "num_classes", None) or (len(train.classes) if hasattr(train, "classes") else None)
    return Data(train, test, tuple(shape), classes, digest)


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
    """Turns a plan's micro-batch into tensors; runs in the training process or in a DataLoader worker.

    With `max_bad`, a sample that cannot be read gives its place to the next one that can, the same at every world
    size, and each process bears with so many of them; with None it ends the run.
    """

    def __init__(self, dataset: Any, *, seed: int, augment: bool, max_bad: int | None = None):
        self.dataset, self.seed, self.augment, self.max_bad = dataset, seed, augment, max_bad
        self.bad: set[int] = set()

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
        with _kept_generators():
            pairs = zip(micro_batch.indices.tolist(), keys.tolist(), strict=True)
            samples = [self._sample(index, key) for index, key in pairs]
        inputs, targets = default_collate(samples)[:2]
        return inputs, targets

    def bytes_of_one(self) -> int:
        """The size of a sample, found without a trace in the global generators."""
        with _kept_generators():
            return _bytes(self._sample(0, 0))

    def _sample(self, index: int, key: int) -> Any:
        while True:
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            torch.default_generator.manual_seed(key)
            if self.max_bad is None:
                return self.dataset[index]
            try:
                return self.dataset[index]
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                if index not in self.bad:
                    self.bad.add(index)
                    say(f"muster: sample {index} cannot be read, the next takes its place: {reason}")
                if len(self.bad) > self.max_bad:
                    raise DataError(
                        f"{len(self.bad)} samples cannot be read, more than loader.max_bad_samples={self.max_bad}: the last is {index}: {reason}"
                    ) from error
                index = (index + 1) % len(self.dataset)


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """Leave the global random number generators as they were: a resumed run has to find them untouched."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    # torchrun signals the whole process group: a worker that dies of SIGTERM takes the last checkpoint with it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a rank that was killed


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
    max_bad: int | None = None,
) -> Iterator[list[Batch]]:
    """For each step its micro-batches for shard `(rank, size)`, on the device.

    One loader serves the whole range, across epochs: its workers are started once, and nothing stalls at a boundary.
    """
    rank, size = shard
    fetch = Fetch(dataset, seed=seed, augment=augment, max_bad=max_bad)
    if num_workers:
        samples = min(-(-plan.batch_size // size), micro_batch_size or plan.batch_size)
        check_shared_memory(samples * fetch.bytes_of_one(), num_workers=num_workers)
    shares = (plan.share(step, rank=rank, world_size=size, micro_batch_size=micro_batch_size) for step in steps)
    loader = DataLoader(
        fetch,
        batch_sampler=(micro for share in shares for micro in share),  # type: ignore[misc]
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or it would draw from the global one, which a resumed run has to find untouched
    )
    fetched = _plainly(iter(loader))
    for step in steps:
        total = plan.count(step)
        yield [
            Batch(to(device, inputs), to(device, targets), count, total)
            for inputs, targets, count in islice(
                fetched, plan.pieces(step, world_size=size, micro_batch_size=micro_batch_size)
            )
        ]


def check_shared_memory(batch_bytes: int, *, num_workers: int, place: str = "/dev/shm") -> None:
    """Workers hand over batches through shared memory; where it is full, a batch is lost and waited for for ever.

    Raises:
        ConfigError: there is not enough for the batches that wait at a time.
    """
    if not os.path.isdir(place):
        return
    needed, free = batch_bytes * (2 * num_workers + 1), shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"loader.num_workers={num_workers} needs about {needed / 2**20:.1f} MiB of {place} a rank, and {free / 2**20:.1f} are free: make it "
            "larger (docker --shm-size, a Kubernetes emptyDir with medium: Memory), or set fewer workers or a smaller micro_batch_size"
        )


def _bytes(value: Any) -> int:
    """Of the tensors in it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return sum(map(_bytes, parts))


def _plainly(fetched: Iterator[Any]) -> Iterator[Any]:
    """A worker's DataError as it was raised there: the loader wraps a traceback around it."""
    try:
        yield from fetched
    except DataError as error:
        raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None


def to(device: torch.device, value: Any) -> Any:
    """Move tensors, alone or in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to(device, item) for key, item in value.items()}
    return type(value)(to(device, item) for item in value) if isinstance(value, (tuple, list)) else value
