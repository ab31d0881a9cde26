"""Assign samples to ranks and steps: a pure function of (seed, epoch, step), without state or communication.

At any world size, global step `s` takes the next `batch_size` entries of its epoch's permutation; each rank takes its slice of them.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

ROUNDS = 6
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
WEIGHTED = np.uint64(0xD1B54A32D192ED03)
SORTED = 1 << 16
"""Up to this many samples, an epoch is sorted by hash: a Feistel network over few digits keeps neighbors together."""


def mix(x: Keys) -> Keys:
    """Hash 64-bit words elementwise with the splitmix64 finalizer.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    x = x + GAMMA
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def sample_keys(*, seed: int, epoch: int, indices: Indices) -> Keys:
    """Return one key per sample, `[B] uint64`. Augmentation may depend on this key and on nothing else."""
    return mix(_stream(seed, epoch) ^ indices.astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _stream(seed: int, epoch: int) -> Keys:
    return mix(mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch))


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random bijection of `range(size)`. Above `SORTED` entries, it takes O(1) memory.

    Up to `SORTED` entries are sorted by hash. A larger range goes through a Feistel network over pairs (left, right) of
    digits in base ceil(sqrt(size)), with addition modulo the base. Values outside the range are encrypted again until they
    fall inside, which keeps the map a bijection.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (cycle-walking, generalized Feistel).
    """

    size: int
    seed: int
    epoch: int

    def __call__(self, positions: Indices) -> Indices:
        """Map `[B] int64` positions in `range(size)` to `[B] int64` sample indices."""
        if self.size <= SORTED:
            return _sorted_by_hash(self.size, self.seed, self.epoch)[positions]
        base = max(1, int(np.ceil(np.sqrt(float(self.size)))))
        while base * base < self.size:  # sqrt of a large integer may round down
            base += 1
        values = self._encrypt(positions.astype(np.uint64), np.uint64(base))
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            values[outside] = self._encrypt(values[outside], np.uint64(base))
            outside = outside[values[outside] >= np.uint64(self.size)]
        return values.astype(np.int64)

    def _encrypt(self, values: Keys, base: np.uint64) -> Keys:
        left, right = values // base, values % base
        stream = _stream(self.seed, self.epoch)
        for r in range(ROUNDS):
            round_key = mix(stream ^ np.uint64((r + 1) << 32))
            left, right = right, (left + mix(round_key ^ right) % base) % base
        return left * base + right


@functools.lru_cache(maxsize=2)
def _sorted_by_hash(size: int, seed: int, epoch: int) -> Indices:
    keys = sample_keys(seed=seed, epoch=epoch, indices=np.arange(size, dtype=np.int64))
    order = np.argsort(mix(keys), kind="stable")  # hash again: augmentation uses the keys themselves
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank.

    indices: `[B] int64` sample indices.
    count: samples that belong to this rank. A rank with an empty share must still join the collectives: it gets one sample
        with `count` 0, which has no weight.
    slice: its slice of the global batch: the rank's, or one of `virtual_world_size`.
    draws: `[B] int64`, makes the samples' keys in place of the indices: a sample that weights draw twice in an epoch is
        augmented in two ways.
    """

    epoch: int
    indices: Indices
    count: int
    slice: int = 0
    draws: Indices | None = None


class Weights:
    """Draws sample i with probability proportional to `weights[i]`, with replacement: entry by entry, from a hash.

    `weights`: `[size] float64`, finite, at least 0, and not all 0.
    """

    def __init__(self, weights: npt.NDArray[np.float64]):
        self._upto = np.cumsum(weights)
        self._last = int(np.flatnonzero(weights)[-1])

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Map `[B] int64` positions in an epoch to `[B] int64` sample indices."""
        keys = mix(mix(_stream(seed, epoch) ^ WEIGHTED) ^ positions.astype(np.uint64))  # not the samples' own keys
        drawn = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._upto[-1]
        found: Indices = np.minimum(np.searchsorted(self._upto, drawn, side="right"), self._last).astype(np.int64)
        return found


@dataclass(frozen=True)
class Plan:
    """The order of `size` samples over steps and epochs, in global batches of `batch_size`.

    weights: draws the `size` entries of an epoch, in place of the samples' order.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    weights: Weights | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; without `drop_last` the last one may be smaller."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch of `step`; both from 0."""
        return step // self.steps_per_epoch

    def samples_before(self, step: int) -> int:
        epoch, within = divmod(step, self.steps_per_epoch)
        per_epoch = min(self.size, self.steps_per_epoch * self.batch_size)
        return epoch * per_epoch + min(within * self.batch_size, self.size)

    def count(self, step: int) -> int:
        """Return the samples in step `step`: `batch_size`, or fewer at the end of an epoch."""
        start = (step % self.steps_per_epoch) * self.batch_size
        return min(self.batch_size, self.size - start)

    def batch(self, step: int) -> Indices:
        """Return the global batch: `[count] int64` sample indices in order."""
        return self._samples(step, 0, self.count(step))

    def share(self, step: int, share: Share) -> list[MicroBatch]:
        cuts, epoch = share.cuts(self.count(step)), self.epoch(step)
        if not cuts:
            return []
        first = cuts[0][1]
        mine = self._samples(step, first, cuts[-1][2])
        spare = mine[:1] if len(mine) else self._samples(step, 0, 1)
        places = self._positions(step, first, first + len(mine)) if self.weights else None
        found = []
        for number, begin, end in cuts:
            here = slice(begin - first, end - first)
            indices, draws = mine[here], None if places is None or begin == end else places[here]
            found.append(MicroBatch(epoch, indices if len(indices) else spare, len(indices), number, draws))
        return found

    def _positions(self, step: int, first: int, end: int) -> Indices:
        start = step % self.steps_per_epoch * self.batch_size
        return np.arange(start + first, start + end, dtype=np.int64)

    def _samples(self, step: int, first: int, end: int) -> Indices:
        epoch, positions = self.epoch(step), self._positions(step, first, end)
        if self.weights:
            return self.weights(positions, seed=self.seed, epoch=epoch)
        return Permutation(self.size, self.seed, epoch)(positions) if self.shuffle else positions


@dataclass(frozen=True)
class Share:
    """One rank's part of every global batch, and how it is split into micro-batches.

    micro_batch_size: maximum number of samples in a micro-batch; None: no limit.
    slices: number of slices of the global batch at any world size; None: one slice per rank.
    """

    rank: int
    world_size: int
    micro_batch_size: int | None = None
    slices: int | None = None

    def cuts(self, count: int) -> list[tuple[int, int, int]]:
        """Return (slice, begin, end) of this rank's micro-batches in a global batch of `count` samples.

        Without `slices` every rank gets the same number of micro-batches, some of them empty: a model with synchronized
        layers must run the same number of forward passes on each rank. With `slices`, an empty slice has no micro-batch.
        """
        if self.slices is None:
            largest = -(-count // self.world_size)
            number = -(-largest // (self.micro_batch_size or largest))
            return _cut(self.rank, *slice_of(count, self.rank, self.world_size), number)
        found: list[tuple[int, int, int]] = []
        for each in leaves_of(self.rank, self.world_size, self.slices):
            begin, end = slice_of(count, each, self.slices)
            found += _cut(each, begin, end, -(-(end - begin) // (self.micro_batch_size or count)))
        return found


@dataclass(frozen=True)
class Dealt(Share):
    """One rank's batch of every `world_size` of them: batches of `size` samples are the same at any world size.

    A rank for which none is left has an empty one, as it must join the collectives.
    """

    size: int = 1

    def cuts(self, count: int) -> list[tuple[int, int, int]]:
        begin, end = (min(count, number * self.size) for number in (self.rank, self.rank + 1))
        return [(self.rank, begin, end)]


def leaves_of(rank: int, world_size: int, slices: int) -> range:
    """Return the consecutive slices that rank `rank` computes."""
    return range(slices * rank // world_size, slices * (rank + 1) // world_size)


def _cut(number: int, begin: int, end: int, parts: int) -> list[tuple[int, int, int]]:
    edges = [begin + slice_of(end - begin, part, parts)[0] for part in range(parts)] + [end]
    return [(number, *edge) for edge in itertools.pairwise(edges)]


def slice_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and end of rank `rank`'s slice of `count` samples; if uneven, the first ranks take one more."""
    share, more = divmod(count, world_size)
    first = rank * share + min(rank, more)
    return first, first + share + (rank < more)
