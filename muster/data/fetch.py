"""Turn a plan's micro-batch into tensors: random transforms keyed by sample, and samples that cannot be read."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from muster.code_location import NOTE, defined, described, located
from muster.data.draw_detection import ALL, TORCH, Looks, Watch
from muster.data.generators import kept_generators, seed_generators
from muster.data.inputs_and_targets import split
from muster.data.own_generators import OwnGenerators
from muster.data.stream import Stream
from muster.errors import DataError, MusterError, one_line, say
from muster.sample_plan import Indices, Keys, MicroBatch, mix, sample_keys

UNREADABLE = (
    ValueError, KeyError, IndexError, EOFError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError
)  # fmt: skip
"""Errors that a dataset raises for a sample's content; other errors are of its code or the machine."""
UNREAD = object()
"""In place of a sample that could not be read."""
OTHERWISE = 0x5DEECE66D
"""Makes another seed of a key."""


class Fetch(Dataset[Any]):
    """Fetches micro-batches, in the training process or in a DataLoader worker.

    If `max_bad` is None, a sample that cannot be read ends the run. Otherwise the next readable sample replaces it, the
    same at every world size, or none if not `replaces_bad`, and each process tolerates `max_bad` such samples.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        max_bad: int | None = None,
        replaces_bad: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        adapter: Callable[[Any], Any] | None = None,
    ):
        self.dataset, self.seed, self.max_bad, self.replaces_bad = dataset, seed, max_bad, replaces_bad
        self.collate, self.adapter = collate, adapter
        self._own = OwnGenerators(dataset, collate, adapter)
        self.whole = takes_keys(dataset)
        self.bad: set[int] = set()
        self._epoch = self._left_out = 0
        self._reads_together = False if self.whole else None
        self._draws = isinstance(dataset, Stream) or (self.whole and not self._is_read_whole)
        self._drawn_from: frozenset[str] | None = ALL if self._draws or max_bad is not None else None
        """The generators that are seeded for each sample, which takes as long as reading a small one; None: not known yet."""

    @property
    def _remedy(self) -> str:
        is_of_trainer = self.adapter is not unsplit
        return "skip such samples with loader.on_bad_sample=skip" if is_of_trainer else "leave it out of the data set"

    @property
    def is_keyed(self) -> bool:
        """True if batches depend on the samples' keys alone, so that they may be fetched at any time."""
        return self._is_read_whole and self.adapter in (None, unsplit)

    @property
    def _is_read_whole(self) -> bool:
        return self.whole and self.max_bad is None and self.collate is None

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[Any, Any, int]:
        """Return (inputs, targets, count) of one micro-batch; the count is less the samples that were left out. Raises DataError."""
        self._epoch, self._left_out, indices = micro_batch.epoch, 0, micro_batch.indices
        draws = indices if micro_batch.draws is None else micro_batch.draws
        if self.is_keyed:
            inputs, targets = self._split(self._whole(indices, draws))
        else:
            inputs, targets = self._undrawn(indices, draws) or self._drawn(indices, draws)
        return inputs, targets, max(0, micro_batch.count - self._left_out)

    def _keys(self, draws: Indices) -> Keys:
        return sample_keys(seed=self.seed, epoch=self._epoch, indices=draws)

    def _whole(self, indices: Indices, draws: Indices) -> Any:
        return self.dataset.__getitems__(indices.tolist(), self._keys(draws))

    def _split(self, batch: Any) -> tuple[Any, Any]:
        return split(batch, self.adapter, source=self.dataset, collate=self.collate)

    def _undrawn(self, indices: Indices, draws: Indices) -> tuple[Any, Any] | None:
        """Return (inputs, targets) if they are made without random numbers, so that nothing need be seeded; else None.

        Seeding for each sample takes longer than reading it. Once something has drawn, the samples are always seeded.
        After an error the samples are read one by one, which says which one it is of.
        """
        if self._draws:
            return None
        watch, own, made = Watch(), self._own.states(), None
        with Looks() as looks, contextlib.suppress(Exception):
            made = self._split(self._whole(indices, draws) if self._is_read_whole else self._together(indices.tolist()))
        if not (watch.drawn() or looks.seen or self._own.have_drawn(own)):
            return made
        watch.restore()
        self._own.restore(own)
        self._draws = True
        return None

    def _together(self, indices: list[int]) -> Any:
        samples = self._samples(indices)
        if self._is_bad(samples):
            raise DataError("a sample is None")  # _sample says which
        return self._made(samples)

    def _samples(self, indices: list[int]) -> list[Any]:
        """Use the data set's `__getitems__` only if it has once given what `__getitem__` gives.

        A transform of a batch may pad it, so that a sample would depend on the others of its micro-batch.
        """
        if self._reads_together:
            return list(self.dataset.__getitems__(indices))
        samples = [self.dataset[index] for index in indices]
        if self._reads_together is None:
            self._reads_together = hasattr(self.dataset, "__getitems__") and same(self.dataset, indices, samples)
        return samples

    def _drawn(self, indices: Indices, draws: Indices) -> tuple[Any, Any]:
        """Return (inputs, targets) whose randomness, also in a user's functions, depends on the samples' keys.

        Functions of a whole batch are seeded with the key of its first sample.
        """
        keys, watch, states = self._keys(draws), Watch(), self._own.states()
        own = int(mix(keys[:1])[0])
        try:
            if self._is_read_whole:
                batch = self._whole(indices, draws)
            else:
                self._left_out = 0
                samples = self._readable(self._seeded(indices, keys, watch), int(indices[0]))
                if isinstance(self.dataset, Stream):
                    self.dataset.refuse_surplus()
                if self.collate:
                    self._seed_all(own)
                batch = self._collated(samples)
            if self.adapter:
                self._seed_all(own)
            return self._split(batch)
        finally:
            watch.restore()
            self._own.restore(states)

    def _seeded(self, indices: Indices, keys: Keys, watch: Watch) -> list[Any]:
        pairs = list(zip(indices.tolist(), keys.tolist(), strict=True))
        if self._drawn_from is None:
            return self._first(pairs)
        while True:
            samples, failure = [], None
            with Looks() as looks:
                try:
                    samples = [self._sample(index, key, self._drawn_from) for index, key in pairs]
                except Exception as error:  # which may come of what was drawn
                    failure = error
            if more := (ALL if looks.seen else watch.drawn()) - self._drawn_from:
                watch.restore()
                self._drawn_from |= more
            elif failure:
                raise failure
            else:
                return samples

    def _first(self, pairs: list[tuple[int, int]]) -> list[Any]:
        """Read each sample after all generators were seeded, and find out which ones must be.

        Always torch's (cheap to seed), and those that samples draw from; but all, if the samples differ when the others are in
        other states: a sample may use a state and put it back.
        """
        samples, drawn = [], {TORCH}
        for index, key in pairs:
            seed_generators(key)
            watch = Watch()
            samples.append(self._sample(index, key, ()))
            drawn |= watch.drawn()
        self._drawn_from = ALL
        with contextlib.suppress(Exception):  # of a sample that can be read, so it depends on another state
            again = []
            for index, key in pairs:
                seed_generators(key ^ OTHERWISE)
                again.append(self._sample(index, key, drawn))
            if alike(samples, again):
                self._drawn_from = frozenset(drawn)
        return samples

    def _is_bad(self, samples: list[Any]) -> bool:
        """Return True if one of them is None: without `max_bad`, a collate function may leave it out."""
        return (not self.collate or self.max_bad is not None) and any(sample is None for sample in samples)

    def _readable(self, samples: list[Any], first: int) -> list[Any]:
        """Return the samples without those that could not be read; if there are no others, one that does not count."""
        left = [sample for sample in samples if sample is not UNREAD]
        self._left_out = len(samples) - len(left)
        return left or [self._sample(first, 0, ALL, replaces=True)]

    def _made(self, samples: list[Any]) -> Any:
        """Collate the samples, and count those that a function of the user's has left out: they are None."""
        batch = (self.collate or default_collate)(samples)
        if self.collate and (missing := sum(sample is None for sample in samples)):
            lengths = lengths_in(batch)
            is_filled = len(samples) in lengths and len(samples) - missing not in lengths
            if missing == len(samples) and not is_filled:
                raise DataError(
                    f"all {missing} samples of a micro-batch are None, and nothing is left of it{defined(self.collate, '__call__')}: take larger "
                    "micro-batches, or give other samples in place of those"
                )
            self._left_out += 0 if is_filled else missing
        return batch

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return self._made(samples)
        except Exception as error:
            if self.collate:
                raise
            said = list(dict.fromkeys(map(described, samples)))
            raise DataError(
                f"samples do not make a batch{defined(self.dataset, '__getitem__', '__iter__')}: the first is {' and another '.join(said[:2])} "
                f"({one_line(error)[:160]}): {remedy(self.dataset, samples[0])}"
            ) from error

    def sample(self, index: int) -> Any:
        """Read one sample without changing the generators."""
        states = self._own.states()
        with kept_generators():
            try:
                if isinstance(self.dataset, Stream):
                    return self.dataset.first()[0]
                return self._sample(index, 0, ALL, replaces=True)
            finally:
                self._own.restore(states)

    def _sample(self, index: int, key: int, of: Collection[str], *, replaces: bool | None = None) -> Any:
        """Read a sample, or the next readable one if `replaces`; None: as `replaces_bad`."""
        asked, replaces = index, self.replaces_bad if replaces is None else replaces
        while True:
            try:
                sample = self._read(index, key, of)
                if self._is_bad([sample]):
                    raise DataError(
                        f"sample {index} is None{defined(self.dataset, '__getitem__', '__iter__')}: write `return ...` for it, or {self._remedy}"
                    )
                return sample
            except Exception as error:
                if self.max_bad is None and isinstance(error, UNREADABLE):
                    raise DataError(
                        f"sample {index} cannot be read: {located(error)}; fix it, or {self._remedy}"
                    ) from error
                if self.max_bad is None:
                    if not isinstance(error, MusterError):
                        error.add_note(f"{NOTE}{index})")
                    raise
                self._tolerate(index, error, replaces=replaces)
                if not replaces:
                    return UNREAD
                index = (index + 1) % len(self.dataset)
                if index == asked:
                    raise DataError(f"no sample can be read in place of {asked}: {one_line(error)}") from error

    def _read(self, index: int, key: int, of: Collection[str]) -> Any:
        """Read one sample. The global generators `of` and its own are seeded, so that random transforms depend on its key alone."""
        if self.whole:
            batch = self.dataset.__getitems__([index], np.array([key], dtype=np.uint64))
            return pytree.tree_map(lambda part: part[0], batch)
        if isinstance(self.dataset, Stream):
            self.dataset.seek(self._epoch, index, seed=self._seed)
            return self.dataset.take()
        self._seed_all(key, only=of)
        return self.dataset[index]

    def _seed(self, index: int) -> None:
        self._seed_all(int(sample_keys(seed=self.seed, epoch=self._epoch, indices=np.array([index]))[0]))

    def _seed_all(self, key: int, *, only: Collection[str] = ALL) -> None:
        seed_generators(key, only=only)
        self._own.seed(key)

    def _tolerate(self, index: int, error: Exception, *, replaces: bool) -> None:
        reason = " ".join(str(error).split())[:200]
        if index not in self.bad:
            self.bad.add(index)
            instead = "the next one is used in its place" if replaces else "it is left out"
            say(f"muster: sample {index} cannot be read, {instead}: {reason}")
        if len(self.bad) > (self.max_bad or 0):
            raise DataError(
                f"{len(self.bad)} samples cannot be read, more than loader.max_bad_samples={self.max_bad}: the last is {index}: {reason}"
            ) from error


def lengths_in(batch: Any) -> set[int]:
    """Return the lengths of a batch's tensors, and of the lists or tuples that it consists of."""
    parts = (
        [*batch.values()] if isinstance(batch, Mapping) else list(batch) if isinstance(batch, list | tuple) else [batch]
    )
    tensors = [each for each in pytree.tree_leaves(parts) if isinstance(each, torch.Tensor) and each.dim()]
    return {len(each) for each in [*tensors, *(each for each in parts if isinstance(each, list | tuple))]}


def same(dataset: Any, indices: list[int], samples: list[Any]) -> bool:
    """Return True if `dataset.__getitems__` gives these samples for `indices`, as a list."""
    try:
        together = dataset.__getitems__(indices)
    except Exception:
        return False
    return isinstance(together, list) and alike(samples, together)


def alike(some: Any, others: Any) -> bool:
    """Return True if two trees have the same leaves, bit for bit; False also if they cannot be compared."""
    try:
        (ours, kind), (theirs, other) = pytree.tree_flatten(some), pytree.tree_flatten(others)
        return kind == other and all(map(_equal, ours, theirs))
    except Exception:
        return False


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def unsplit(batch: Any) -> tuple[Any, None]:
    """Return (batch, None): the adapter of a loop that splits its batches itself."""
    return batch, None


def remedy(dataset: Any, sample: Any) -> str:
    """Return the advice for samples of `dataset` like `sample` that cannot be collated."""
    if not any("PIL" in described(leaf) for leaf in pytree.tree_leaves(sample)):
        return (
            "combine them with loader.collate_fn=package.module.function, or collate_fn= of job.batches or job.evaluate"
        )
    if "transform" in inspect.signature(type(dataset)).parameters:
        return "write +data.transform._target_=torchvision.transforms.ToTensor"
    return "convert the picture to a tensor there, with torchvision.transforms.functional.to_tensor(picture)"


def takes_keys(dataset: Any) -> bool:
    """Return True if `dataset.__getitems__(indices, keys)` returns a whole micro-batch from the samples' own keys.

    A method without `keys` (as in torch's Subset) may draw random numbers for the batch: then its samples are read one by
    one. The `keys` of Hugging Face's Dataset are the indices.
    """
    method = getattr(dataset, "__getitems__", None)
    return method is not None and "keys" in [*inspect.signature(method).parameters][1:]
