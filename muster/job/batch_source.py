"""Where the batches of a loop come from: a data set, by the sample plan, or a DataLoader of the loop's own.

Both resume in the middle of an epoch from the number of steps done alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from muster.checkpoint.tensor_versions import place
from muster.data.fingerprint import fingerprint, hash_of, look
from muster.data.generators import kept_generators, key_of, seed_generators
from muster.data.loader import LoaderConfig, batches, to
from muster.data.own_generators import KINDS, seed_one
from muster.data.stream import Stream
from muster.data.weights import weights_of
from muster.errors import ConfigError
from muster.sample_plan import Plan, Share
from muster.world.counts import counted as checked

PARTS = ("sampler", "batch_sampler", "dataset", "data_source")
"""Attributes in which loaders, samplers and data sets hold others."""
_began = WeakKeyDictionary[Any, str]()


@dataclass(frozen=True)
class Portion:
    """One rank's micro-batch of a step: `count` of the step's `total` samples; 0 of 0 if a loader does not say how many.

    begins, ends: whether it is this rank's first and last one of the step.
    of, of_step: what is counted in it, and in all of this rank's of the step; `of` is None if these are its planned samples.
    """

    batch: Any
    count: int = 0
    total: int = 0
    begins: bool = True
    ends: bool = True
    of: float | None = None
    of_step: float = 0.0


def counted(portions: Iterator[Portion], count: Callable[[Any], Any] | None) -> Iterator[Portion]:
    """Yield the portions with what `count` finds in each; None: its samples. Raises ConfigError: that is no count."""
    step = list[Portion]()
    for each in portions:
        found = count(each.batch) if count and (each.count or not each.total) else float(each.count)
        step.append(dataclasses.replace(each, of=checked(found, "the function count of batches()")))
        if each.ends:
            of_step = sum(one.of or 0.0 for one in step)
            yield from (dataclasses.replace(one, of_step=of_step) for one in step)
            step = []


class BatchSource(Protocol):
    """Batches by the number of steps done.

    total_steps: of the whole run. samples_per_epoch: 0 if unknown. source: the loop's own data set or loader.
    facts: what identifies the batches; a resume with others is refused.
    last_count: samples of an epoch's last batch if a rank has at most one of them, and the run comes to it; else 0.
    """

    source: Any

    total_steps: int
    steps_per_epoch: int
    samples_per_epoch: int
    facts: dict[str, Any]
    last_count: int

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the steps before `step`; 0 if unknown."""

    def portions(self, step: int) -> Iterator[Portion]:
        """Yield this rank's batches from `step` to the end."""


class PlannedSource:
    """Batches of a data set: each step takes the plan's next `plan.batch_size` samples, and a rank its share of them.

    weights: digest of the plan's.
    """

    def __init__(self, dataset: Any, plan: Plan, *, total_steps: int, loader: LoaderConfig, weights: str):
        self.dataset, self.plan, self.total_steps, self.loader = dataset, plan, total_steps, loader
        self.source = dataset.dataset if isinstance(dataset, Stream) else dataset
        self.steps_per_epoch, self.samples_per_epoch = plan.steps_per_epoch, plan.size
        self.facts = {
            "batch_size": plan.batch_size,
            "drop_last": plan.drop_last,
            "shuffle": plan.shuffle,
            "weights": weights,
            "seed": plan.seed,
            "fingerprint": fingerprint(dataset),
        }
        share, count = loader.share, plan.count(plan.steps_per_epoch - 1)
        smallest = min(
            end - begin
            for _, begin, end in Share(share.world_size - 1, share.world_size, share.micro_batch_size).cuts(count)
        )
        is_short = count < plan.batch_size and total_steps >= plan.steps_per_epoch
        self.last_count = count if is_short and smallest <= 1 else 0

    def samples_before(self, step: int) -> int:
        return self.plan.samples_before(step)

    def portions(self, step: int) -> Iterator[Portion]:
        for micro_batches in batches(self.dataset, self.plan, range(step, self.total_steps), self.loader):
            last = len(micro_batches) - 1
            for number, each in enumerate(micro_batches):
                yield Portion(each.inputs, each.count, each.total, begins=number == 0, ends=number == last)


def is_undivided(batch_sampler: Any) -> bool:
    """Return whether a DataLoader's `batch_sampler` leaves no samples to other ranks, as far as can be seen."""
    kinds = (RandomSampler, SequentialSampler, WeightedRandomSampler)
    return type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in kinds


def read_now() -> Any:
    """Return the batch sampler of a DataLoader that is being read in this process; None if there is none."""
    found = [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
    return next((each._index_sampler for each in found if _is_within(each)), None)


def _is_within(iterator: _BaseDataLoaderIter) -> bool:
    with contextlib.suppress(Exception):  # a stream has no length, nor have some samplers
        return iterator._num_yielded < len(iterator)
    return True


class LoaderSource:
    """Batches of a DataLoader, exact after a resume with as many ranks as before.

    It seeds the global generators for each batch. For each epoch it seeds those that the loader, its samplers and its data sets hold,
    calls their `set_epoch`, and starts persistent workers again. It reads and drops the epoch's batches that were trained on before.
    """

    def __init__(self, loader: Any, *, total_steps: int, device: torch.device, seed: int, rank: int = 0):
        self.loader = self.source = loader
        self.total_steps, self.device = total_steps, device
        self.seed, self.rank = seed, rank
        self.steps_per_epoch, self.samples_per_epoch = len(loader), 0
        self.facts, self.last_count = {"steps_per_epoch": self.steps_per_epoch, "seed": seed}, 0

    @property
    def is_whole(self) -> bool:
        """True if no sampler leaves samples to other ranks, as far as can be seen."""
        return is_undivided(getattr(self.loader, "batch_sampler", None))

    def fingerprint(self) -> str:
        """Return the fingerprint of the loader's data set; of a Subset, which may be this rank's part, with its indices."""
        dataset, parts = self.loader.dataset, list[bytes]()
        while isinstance(dataset, Subset):
            parts.append(repr([*dataset.indices]).encode())
            dataset = dataset.dataset
        return f"{fingerprint(self.loader.dataset)}:{hash_of(parts)}"

    @property
    def sampler(self) -> str:
        return type(self.loader.batch_sampler.sampler).__name__

    def line(self, ranks: int) -> str:
        """Return the call that gives each of the `ranks` its share of these batches."""
        batches = self.loader.batch_sampler
        weights, ordered = ", weights=sampler.weights", ", shuffle=False"
        again = ", weights=[1.0] * len(dataset)" if getattr(batches.sampler, "replacement", False) else ""
        more = {WeightedRandomSampler: weights, SequentialSampler: ordered}.get(type(batches.sampler), again)
        return f"job.batches(dataset, batch_size={batches.batch_size * ranks}{more}, ...)"

    def samples_before(self, step: int) -> int:
        return 0

    def portions(self, step: int) -> Iterator[Portion]:
        self._go_through(step // self.steps_per_epoch)
        while step < self.total_steps:
            for batch in self._epoch(*divmod(step, self.steps_per_epoch)):
                if step == self.total_steps:
                    return
                yield Portion(to(self.device, batch))
                step += 1

    def _begin(self, epoch: int) -> int:
        key = key_of(self.seed, "epoch", epoch)
        for each in parts_of(self.loader):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            _seed_own(each, key)
        return key

    def _epoch(self, epoch: int, done: int) -> Iterator[Any]:
        key = self._begin(epoch)
        if getattr(self.loader, "persistent_workers", False):
            self.loader._iterator = None  # workers of an earlier epoch have generators that a resume cannot restore
        items: Iterator[Any] | None = None
        for number in count():
            with kept_generators():  # each batch has a seed of its own: a stream may draw what comes later
                seed_generators(key if number == 0 else key_of(key, number, self.rank))
                items = (
                    iter(self.loader) if items is None else items
                )  # a sampler draws its seed only when its first batch is read
                found = [*islice(items, 1)]
            if not found and number < done:
                raise ConfigError(f"the loader ends after {number} batches, and its length is {self.steps_per_epoch}")
            if not found:
                return
            if number >= done:
                yield found[0]

    def _go_through(self, epochs: int) -> None:
        """Read the order of earlier epochs, but no samples: a sampler may shuffle its previous order."""
        batches = getattr(self.loader, "batch_sampler", None)
        if batches is None or all(type(each).__module__.startswith("torch.") for each in _samplers(batches)):
            return
        for epoch in range(epochs):
            self._begin(epoch)
            with kept_generators():
                seed_generators(key_of(self.seed, "epoch", epoch))
                items = iter(batches)
                torch.empty((), dtype=torch.int64).random_(
                    generator=getattr(self.loader, "generator", None)
                )  # as an iterator does
                for _ in items:
                    pass


def _samplers(batches: Any) -> Iterator[Any]:
    while batches is not None:
        yield batches
        batches = getattr(batches, "sampler", None)


def parts_of(loader: Any) -> Iterator[Any]:
    """Yield a loader, its samplers and data sets, and those inside them (a BatchSampler's sampler, a Subset's data)."""
    found: list[Any] = [loader]
    for each in found:
        inner = (getattr(each, name, None) for name in PARTS)
        found += [part for part in inner if part is not None and all(part is not other for other in found)]
    yield from found


def moved_on(source: Any) -> str:
    """Return the class of a stream or sampler in `source` that has changed since this process first read it; empty if none has.

    In the next attempt it would continue from there in this process, but from its beginning in a rank that is restarted in place.
    """
    for part in parts_of(source):
        is_own = isinstance(part, Sampler) and not type(part).__module__.startswith("torch.")
        if is_own or isinstance(part, IterableDataset):
            now = hash_of(_seen(part))
            if _began.setdefault(part, now) != now:
                return type(part).__name__
    return ""


def _seen(part: Any) -> Iterator[Any]:
    """Yield an object's state: numbers and texts by value, tensors by address and version, all else by its type."""
    left_out = ("epoch", "_epoch") if hasattr(part, "set_epoch") else ()
    state = {name: value for name, value in vars(part).items() if name not in left_out}
    for leaf in pytree.tree_leaves(state):
        yield place(leaf) if isinstance(leaf, torch.Tensor) else look([leaf])
    yield [*state]


def _seed_own(part: Any, key: int) -> None:
    for own in getattr(part, "__dict__", {}).values():
        if isinstance(own, KINDS):
            seed_one(own, key)


def batch_source(
    source: Any,
    *,
    batch_size: int | None,
    epochs: int | None,
    max_steps: int | None,
    shuffle: bool,
    drop_last: bool,
    loader: LoaderConfig,
    weights: Any = None,
) -> BatchSource:
    """Return the batches of `source`, a data set or a DataLoader. See `Job.batches`.

    loader: how the samples of a data set are fetched, and this rank's share of them.
    Raises ConfigError: an argument is missing or out of range, or `source` is neither.
    """
    if (epochs is None) == (max_steps is None):
        raise ConfigError(f"batches(epochs={epochs}, max_steps={max_steps}): give one of the two")
    sizes = {"batch_size": batch_size, "micro_batch_size": loader.share.micro_batch_size}
    at_least_one("batches", epochs=epochs, max_steps=max_steps, **sizes)
    if is_loader(source):
        if given := [name for name, size in sizes.items() if size is not None]:
            raise ConfigError(
                f"batches(loader, {given[0]}={sizes[given[0]]}): a DataLoader has its own batch size; leave {given[0]} out"
            )
        if weights is not None:
            raise ConfigError(
                "batches(loader, weights=...): a DataLoader has a sampler of its own; give batches() the data set itself"
            )
        in_epoch = _number_of_batches(source)
        total = max_steps or (epochs or 0) * in_epoch
        return LoaderSource(source, total_steps=total, device=loader.device, seed=loader.seed, rank=loader.share.rank)
    if batch_size is None:
        raise ConfigError("batches(dataset) needs batch_size=..., the samples per optimizer step over all ranks")
    dataset = with_length(source, "batches")
    if weights is not None and not shuffle:
        raise ConfigError("batches(weights=..., shuffle=False): weights draw samples at random; leave shuffle out")
    drawn, digest = (None, "none") if weights is None else weights_of(weights, dataset, said="batches(weights=...)")
    plan = Plan(
        len(dataset),
        min(batch_size, len(dataset)),
        loader.seed,
        shuffle=shuffle and dataset is source,
        drop_last=drop_last,
        weights=drawn,
    )
    total = max_steps or (epochs or 0) * plan.steps_per_epoch
    return PlannedSource(dataset, plan, total_steps=total, loader=loader, weights=digest)


def is_loader(source: Any) -> bool:
    """Return True for a DataLoader, also of another library: it yields batches, and has no samples by index."""
    if isinstance(source, DataLoader):
        return True
    return not isinstance(source, IterableDataset) and not hasattr(source, "__getitem__")


def _number_of_batches(loader: Any) -> int:
    try:
        return len(with_length(loader, "batches"))
    except TypeError:
        stream = type(getattr(loader, "dataset", loader)).__name__
        raise ConfigError(
            f"batches(loader) has a stream without a length, {stream}: give it __len__, the number of samples of an epoch"
        ) from None


def at_least_one(what: str, **given: int | None) -> None:
    """Raise ConfigError for an argument of `what` that is neither None nor a whole number of at least 1."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{what}({name}={value!r}): give a whole number of at least 1")


def with_length(source: Any, what: str) -> Any:
    """Return `source`, or a `Stream` of an IterableDataset. Raises ConfigError: it has no length, or no samples.

    what: the method that it is given to, for the message.
    """
    dataset = Stream(source) if isinstance(source, IterableDataset) else source
    if not isinstance(dataset, Sized) or not len(dataset):
        raise ConfigError(f"{what}({type(source).__name__}) has no length, or no samples: give it __len__")
    return dataset
