"""Time accounting of one rank between two log lines."""

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
