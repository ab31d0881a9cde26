"""Detect stragglers, ranks that the others repeatedly wait for, over consecutive windows. Rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from muster.timing.clock import Times

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
