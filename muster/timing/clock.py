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
        """Seconds for data, this rank's share of the gradient and its steps: the time that other ranks wait for."""
        return max(0.0, self.seconds - self.wait - self.evaluation - self.checkpoint)

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, part) + getattr(other, part) for part in PARTS))

    def row(self) -> list[float]:
        """Return the seconds in the order of `PARTS`."""
        return [getattr(self, part) for part in PARTS]


class Clock:
    """Accumulates this rank's times; `read` resets it.

    Args:
        waited_s: returns the seconds waited for other ranks since its last call (Strategy.waited_s).
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0):
        self._waited_s, self._since = waited_s, time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._within, self._asked = "", 0

    def begin(self) -> None:
        """Start counting, when training begins."""
        self._waited_s()
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time in this context as `part`: evaluation or checkpoint. Nested, only the inner part counts it."""
        outer, began, before = self._within, time.perf_counter(), sum(self._spent.values())
        self._within = part
        try:
            yield
        finally:
            self._within = outer
            self._spent[part] += time.perf_counter() - began - (sum(self._spent.values()) - before)

    def waiting(self, data: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of `data`, and count the time to get each as waiting for data, unless inside `spending`."""
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
        """Return the times since the last call, and reset. On CUDA all steps so far must have finished."""
        times = replace(self.rest(), wait=self._waited_s())
        self._since, self._spent = self._since + times.seconds, dict.fromkeys(self._spent, 0.0)
        return times

    def is_due(self, world_size: int) -> bool:
        """Return True if the clock is to be read at this log line.

        With more than `RANKS_AT_EVERY_LINE` ranks it is read less often, because all ranks' times go to all ranks.
        The calls are counted, so every rank must make the same calls.
        """
        self._asked += 1
        return self._asked % (-(-world_size // RANKS_AT_EVERY_LINE)) == 0

    def rest(self) -> Times:
        """Return the times since the last read, without the waits for ranks; the last step need not have finished."""
        return Times(seconds=time.perf_counter() - self._since, **self._spent)


def spread(times: Times, *, rank: int, size: int) -> list[float]:
    """Return this rank's times in a row of zeros for the others, so that the sum over ranks has all ranks' times."""
    row = times.row()
    return [0.0] * (rank * len(row)) + row + [0.0] * ((size - 1 - rank) * len(row))


def gathered(values: Sequence[float]) -> list[Times]:
    """Return all ranks' times from the sum of their `spread`."""
    number = len(PARTS)
    return [Times(*values[first : first + number]) for first in range(0, len(values), number)]
