"""Which sample goes to which rank at which step.

A pure function of (seed, epoch, step): no state, no stored permutation, no communication. Global step `s` takes
the next `batch_size` entries of its epoch's permutation whatever the world size; a rank takes its slice of them.
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
SORTED = 1 << 16
"""Up to so many samples an epoch's order is a sort by hash: a Feistel network over few digits leaves neighbours together."""


def mix(x: Keys) -> Keys:
    """Hash 64-bit words, elementwise: the splitmix64 finaliser.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    x = x + GAMMA
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def sample_keys(*, seed: int, epoch: int, indices: Indices) -> Keys:
    """One 64-bit key a sample, `[B] uint64`: what augmentation may depend on, and nothing else."""
    return mix(_stream(seed, epoch) ^ indices.astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _stream(seed: int, epoch: int) -> Keys:
    return mix(mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch))


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random bijection of `range(size)`, computed entry by entry in O(1) memory.

    Of a small range all entries at once, sorted by hash. Of a larger one a Feistel network over pairs (left, right) of digits in base ceil(sqrt(size)) with addition modulo the base;
    values outside the range are walked on until they fall inside, which keeps it a bijection.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (cycle-walking and
    generalised Feistel).
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
    order = np.argsort(mix(keys), kind="stable")  # mixed once more: augmentation has the keys themselves
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class MicroBatch:
    """What one rank puts through its model at once.

    `count` is the number of samples that are truly this rank's. A rank whose share is empty still has to take part
    in the collectives: it gets one sample with `count` 0, which weighs nothing. `slice` is the number of the slice
    of the global batch that it belongs to: the rank's, or one of `virtual_world_size`.
    """

    epoch: int
    indices: Indices
    count: int
    slice: int = 0


@dataclass(frozen=True)
class Plan:
    """The order in which `size` samples are trained on, in global batches of `batch_size`."""

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that global step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` take in all."""
        epoch, within = divmod(step, self.steps_per_epoch)
        per_epoch = min(self.size, self.steps_per_epoch * self.batch_size)
        return epoch * per_epoch + min(within * self.batch_size, self.size)

    def count(self, step: int) -> int:
        """How many samples step `step` takes: `batch_size`, or fewer at the end of an epoch."""
        start = (step % self.steps_per_epoch) * self.batch_size
        return min(self.batch_size, self.size - start)

    def batch(self, step: int) -> Indices:
        """The global batch of step `step`: `[count] int64` sample indices in order."""
        return self._samples(step, 0, self.count(step))

    def share(self, step: int, share: Share) -> list[MicroBatch]:
        """A rank's share of step `step`, cut into micro-batches."""
        cuts, epoch = share.cuts(self.count(step)), self.epoch(step)
        if not cuts:
            return []
        first = cuts[0][1]
        mine = self._samples(step, first, cuts[-1][2])
        spare = mine[:1] if len(mine) else self._samples(step, 0, 1)
        parts = [(number, mine[begin - first : end - first]) for number, begin, end in cuts]
        return [MicroBatch(epoch, part if len(part) else spare, len(part), number) for number, part in parts]

    def _samples(self, step: int, first: int, end: int) -> Indices:
        """The entries `first` to `end` of the global batch; only they are computed."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        positions = np.arange(start + first, start + end, dtype=np.int64)
        return Permutation(self.size, self.seed, epoch)(positions) if self.shuffle else positions


@dataclass(frozen=True)
class Share:
    """Which part of every global batch is one rank's, and how it is cut.

    micro_batch_size: the most samples of a micro-batch.
    slices: into how many the global batch is cut, whatever the world size; None: one for each rank.
    """

    rank: int
    world_size: int
    micro_batch_size: int | None = None
    slices: int | None = None

    def cuts(self, count: int) -> list[tuple[int, int, int]]:
        """(slice, begin, end) of each micro-batch of a global batch of `count` samples.

        Without `slices` every rank gets the same number of them, because a model with synchronised layers has to run
        as many forward passes on each; some may then be empty. With them there are none for a slice without samples.
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


def leaves_of(rank: int, world_size: int, slices: int) -> range:
    """The slices that rank `rank` works through: consecutive ones."""
    return range(slices * rank // world_size, slices * (rank + 1) // world_size)


def _cut(number: int, begin: int, end: int, parts: int) -> list[tuple[int, int, int]]:
    """`parts` pieces of begin to end that differ by one at most, the longer ones first."""
    edges = [begin + slice_of(end - begin, part, parts)[0] for part in range(parts)] + [end]
    return [(number, *edge) for edge in itertools.pairwise(edges)]


def slice_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where rank `rank`'s slice of `count` samples begins and ends; the first ranks take one more where it is uneven."""
    share, more = divmod(count, world_size)
    first = rank * share + min(rank, more)
    return first, first + share + (rank < more)
