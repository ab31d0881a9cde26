"""Time accounting of one rank between two log lines, and the rank that the others wait for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

Item = TypeVar("Item")
RANKS_AT_EVERY_LINE = 32
PARTS = ("seconds", "data", "wait", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Times:
    """Seconds of one rank: in total, waiting for data, waiting for other ranks, in evaluation and in checkpoints."""

    seconds: float = 0.0
    data: float = 0.0
    wait: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0

    @property
    def own(self) -> float:
        """Seconds for data, this rank's part of the gradient and its steps: the others wait for them."""
        return max(0.0, self.seconds - self.wait - self.evaluation - self.checkpoint)

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, part) + getattr(other, part) for part in PARTS))

    def row(self) -> list[float]:
        return [getattr(self, part) for part in PARTS]


class Clock:
    """Accumulates this rank's times. `waited_s`: as Strategy.waited_s, since its last call."""

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0):
        self._waited_s, self._since = waited_s, time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._within, self._asked = "", 0

    def begin(self) -> None:
        self._waited_s()
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time in this context as `part`: evaluation or checkpoint. Nested, only the inner one counts."""
        outer, began, before = self._within, time.perf_counter(), sum(self._spent.values())
        self._within = part
        try:
            yield
        finally:
            self._within = outer
            self._spent[part] += time.perf_counter() - began - (sum(self._spent.values()) - before)

    def waiting(self, data: Iterable[Item]) -> Iterator[Item]:
        """Count the time to get each item as waiting for data, unless inside `spending`."""
        items = iter(data)
        while True:
            began = time.perf_counter()
            item = next(items, None)
            if not self._within:
                self._spent["data"] += time.perf_counter() - began
            if item is None:
                return
            yield item

    def read(self) -> Times:
        """Return the times since the last call. On CUDA all steps so far must have finished."""
        times = replace(self.rest(), wait=self._waited_s())
        self._since, self._spent = self._since + times.seconds, dict.fromkeys(self._spent, 0.0)
        return times

    def is_due(self, world_size: int) -> bool:
        """Return True if the clock is to be read at this log line: less often with many ranks, as all times go to all ranks.

        The calls are counted: every rank must make the same.
        """
        self._asked += 1
        return self._asked % (-(-world_size // RANKS_AT_EVERY_LINE)) == 0

    def rest(self) -> Times:
        """Return the times so far without the waits for ranks; the last step need not have finished."""
        return Times(seconds=time.perf_counter() - self._since, **self._spent)


def spread(times: Times, *, rank: int, size: int) -> list[float]:
    """Return this rank's times among zeros for the others: the sum over ranks has all ranks' times (`gathered`)."""
    row = times.row()
    return [0.0] * (rank * len(row)) + row + [0.0] * ((size - 1 - rank) * len(row))


def gathered(values: Sequence[float]) -> list[Times]:
    number = len(PARTS)
    return [Times(*values[first : first + number]) for first in range(0, len(values), number)]


WINDOWS = 3
"""Consecutive windows in which one rank must be late: a slow disk or processor persists, noise does not."""
SHARE = 0.2
"""Minimum share of the time that all ranks lose; less is not worth fixing."""


@dataclass(frozen=True)
class Late:
    """`share`: of the time, lost by all ranks. `cause`: `data` or `compute`."""

    rank: int
    share: float
    cause: str


class Stragglers:
    """Detects stragglers, ranks that the others repeatedly wait for, over consecutive windows. Rank 0 only."""

    def __init__(self) -> None:
        self._late: list[Late] = []
        self._told = -1

    def look(self, window: Sequence[Times]) -> Late | None:
        """Return the rank that was late in the last WINDOWS windows: once, until another rank or none is late."""
        late = latest(window)
        if late is None or (self._late and self._late[-1].rank != late.rank):
            self._late, self._told = [], -1
        if late is None:
            return None
        self._late = [*self._late, late][-WINDOWS:]
        if len(self._late) < WINDOWS or self._told == late.rank:
            return None
        self._told = late.rank
        return Late(late.rank, sum(each.share for each in self._late) / WINDOWS, late.cause)


def latest(window: Sequence[Times]) -> Late | None:
    """Return the rank with the longest own time in `window`, if all ranks lose at least `SHARE` by it."""
    if len(window) < 2:
        return None
    rank = max(range(len(window)), key=lambda each: window[each].own)
    mine, others = window[rank], [times for each, times in enumerate(window) if each != rank]
    lost = mine.own - median(times.own for times in others)
    share = lost / mine.seconds if mine.seconds else 0.0
    if share < SHARE:
        return None
    more_data = mine.data - median(times.data for times in others)
    return Late(rank, share, "data" if more_data > lost / 2 else "compute")
