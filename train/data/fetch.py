"""From a plan's micro-batch to tensors: random changes keyed by sample, and samples that cannot be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from train.data.generators import kept_generators, seed_generators
from train.data.parts import split
from train.data.stream import Stream
from train.errors import DataError, one_line, say
from train.origin import defined, described, located
from train.plan import Indices, Keys, MicroBatch, mix, sample_keys

UNREADABLE = (
    ValueError, KeyError, IndexError, EOFError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError
)  # fmt: skip
"""What a data set raises for what it finds; other errors are its code's, or the machine's."""


class Fetch(Dataset[Any]):
    """Runs in the training process or in a DataLoader worker.

    With `max_bad`, a sample that cannot be read gives its place to the next one that can, the same at every world
    size, and each process tolerates so many of them; with None it ends the run.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        max_bad: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        adapter: Callable[[Any], Any] | None = None,
    ):
        self.dataset, self.seed, self.max_bad = dataset, seed, max_bad
        self.collate, self.adapter = collate, adapter
        self.whole = takes_keys(dataset)
        self.bad: set[int] = set()
        self._epoch = 0

    @property
    def is_keyed(self) -> bool:
        """Whether what it gives depends on nothing but the samples' keys, so that it does not matter when it is asked."""
        return self._is_read_whole and self.adapter is None

    @property
    def _is_read_whole(self) -> bool:
        return self.whole and self.max_bad is None and self.collate is None

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[Any, Any, int]:
        """(inputs, targets, count) of one micro-batch. Raises DataError."""
        self._epoch = micro_batch.epoch
        keys = sample_keys(seed=self.seed, epoch=micro_batch.epoch, indices=micro_batch.indices)
        if self.is_keyed:
            batch = self.dataset.__getitems__(micro_batch.indices.tolist(), keys)
            inputs, targets = split(batch, None, source=self.dataset)
            return inputs, targets, micro_batch.count
        with kept_generators():
            inputs, targets = self._drawn(micro_batch.indices, keys)
        return inputs, targets, micro_batch.count

    def _drawn(self, indices: Indices, keys: Keys) -> tuple[Any, Any]:
        """What a user's functions draw at random depends on the samples' keys, too; on the first one's, for a whole batch."""
        own = int(mix(keys[:1])[0])
        if self._is_read_whole:
            batch = self.dataset.__getitems__(indices.tolist(), keys)
        else:
            samples = [self._sample(index, key) for index, key in zip(indices.tolist(), keys.tolist(), strict=True)]
            if self.collate:
                seed_generators(own)
            batch = self._collated(samples)
        if self.adapter:
            seed_generators(own)
        return split(batch, self.adapter, source=self.dataset, collate=self.collate)

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return (self.collate or default_collate)(samples)
        except Exception as error:
            if self.collate:
                raise
            said = list(dict.fromkeys(map(described, samples)))
            raise DataError(
                f"samples do not make a batch{defined(self.dataset, '__getitem__', '__iter__')}: the first is {' and another '.join(said[:2])} "
                f"({one_line(error)[:160]}): {remedy(self.dataset, samples[0])}"
            ) from error

    def sample(self, index: int) -> Any:
        """One sample, read without a trace in the global generators."""
        with kept_generators():
            return self.dataset.first()[0] if isinstance(self.dataset, Stream) else self._sample(index, 0)

    def _sample(self, index: int, key: int) -> Any:
        while True:
            try:
                sample = self._read(index, key)
                if sample is None and not self.collate:  # which may leave such samples out
                    raise DataError(
                        f"sample {index} is None{defined(self.dataset, '__getitem__', '__iter__')}: write `return ...` for it, or leave "
                        "such samples out with loader.on_bad_sample=skip"
                    )
                return sample
            except Exception as error:
                if self.max_bad is None and isinstance(error, UNREADABLE):
                    raise DataError(
                        f"sample {index} cannot be read: {located(error)}; mend it, or leave such samples out with loader.on_bad_sample=skip"
                    ) from error
                if self.max_bad is None:
                    raise
                self._tolerate(index, error)
                index = (index + 1) % len(self.dataset)

    def _read(self, index: int, key: int) -> Any:
        """Seed the global generators for each sample, so that random transforms depend on nothing but its key."""
        if self.whole:
            batch = self.dataset.__getitems__([index], np.array([key], dtype=np.uint64))
            return pytree.tree_map(lambda part: part[0], batch)
        if isinstance(self.dataset, Stream):
            self.dataset.seek(self._epoch, index, seed=self._seed)
            return self.dataset.take()
        seed_generators(key)
        return self.dataset[index]

    def _seed(self, index: int) -> None:
        """Seed the global generators for sample `index` of the epoch."""
        seed_generators(int(sample_keys(seed=self.seed, epoch=self._epoch, indices=np.array([index]))[0]))

    def _tolerate(self, index: int, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200]
        if index not in self.bad:
            self.bad.add(index)
            say(f"muster: sample {index} cannot be read, the next takes its place: {reason}")
        if len(self.bad) > (self.max_bad or 0):
            raise DataError(
                f"{len(self.bad)} samples cannot be read, more than loader.max_bad_samples={self.max_bad}: the last is {index}: {reason}"
            ) from error


def remedy(dataset: Any, sample: Any) -> str:
    """What to write where samples of `dataset` like this one make no batch."""
    if not any("PIL" in described(leaf) for leaf in pytree.tree_leaves(sample)):
        return "say how they do with loader.collate_fn=package.module.function"
    if "transform" in inspect.signature(type(dataset)).parameters:
        return "write +data.transform._target_=torchvision.transforms.ToTensor"
    return "make a tensor of a picture there, with torchvision.transforms.functional.to_tensor(picture)"


def takes_keys(dataset: Any) -> bool:
    """Whether `dataset.__getitems__(indices, keys)` gives a whole micro-batch by the samples' own keys.

    One without `keys` (torch's Subset has one) may draw random numbers for the batch: then samples are read one by one.
    So are those of Hugging Face's Dataset, whose `keys` are the indices.
    """
    method = getattr(dataset, "__getitems__", None)
    return method is not None and "keys" in [*inspect.signature(method).parameters][1:]
