"""What a rank does with its time between two log lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")
RANKS_AT_EVERY_LINE = 32
PARTS = ("seconds", "data", "wait", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Times:
    """Seconds of one rank: all of them, and those it waited for data and for other ranks, evaluated and saved."""

    seconds: float = 0.0
    data: float = 0.0
    wait: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0

    @property
    def own(self) -> float:
        """What it took to have its share of the gradient and to step: the others wait for that, and for its data."""
        return max(0.0, self.seconds - self.wait - self.evaluation - self.checkpoint)

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, part) + getattr(other, part) for part in PARTS))

    def row(self) -> list[float]:
        return [getattr(self, part) for part in PARTS]


class Clock:
    """Adds up this rank's times; reading it begins anew.

    Args:
        waited_s: seconds waited for others since it was last asked (Strategy.waited_s).
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0):
        self._waited_s, self._since = waited_s, time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._within, self._asked = "", 0

    def begin(self) -> None:
        """Training begins; what was before does not count."""
        self._waited_s()
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """What takes place inside is a `part`: evaluation or checkpoint. Of two, the inner one counts alone."""
        outer, began, before = self._within, time.perf_counter(), sum(self._spent.values())
        self._within = part
        try:
            yield
        finally:
            self._within = outer
            self._spent[part] += time.perf_counter() - began - (sum(self._spent.values()) - before)

    def waiting(self, data: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time that each takes to come is a wait for data, outside of an evaluation."""
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
        """Since it was last read. On CUDA the steps up to now have to be done."""
        times = replace(self.rest(), wait=self._waited_s())
        self._since, self._spent = self._since + times.seconds, dict.fromkeys(self._spent, 0.0)
        return times

    def is_due(self, world_size: int) -> bool:
        """Whether to read it at this log line: of a large world only at every so many-th, for all ranks' times go to all.

        Counts the calls, which have to be the same ones on every rank.
        """
        self._asked += 1
        return self._asked % (-(-world_size // RANKS_AT_EVERY_LINE)) == 0

    def rest(self) -> Times:
        """What is there to read, less the waits, whether or not the last step was finished."""
        return Times(seconds=time.perf_counter() - self._since, **self._spent)


def spread(times: Times, *, rank: int, size: int) -> list[float]:
    """This rank's times among zeros, so that the sum over ranks is everybody's."""
    row = times.row()
    return [0.0] * (rank * len(row)) + row + [0.0] * ((size - 1 - rank) * len(row))


def gathered(values: Sequence[float]) -> list[Times]:
    """Everybody's times, of the sum of all ranks' `spread`."""
    number = len(PARTS)
    return [Times(*values[first : first + number]) for first in range(0, len(values), number)]
