"""Finds the rank that the others wait for, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from train.timing.clock import Times

WINDOWS = 3
"""In so many in a row the same rank has to be late: a slow disk or processor is, a moment's noise is not."""
SHARE = 0.2
"""Of the time, lost by all for it: below that it is not worth a night's work."""


@dataclass(frozen=True)
class Late:
    """The rank that is late, the share of the time that all lose by it, and what it spends that time on."""

    rank: int
    share: float
    cause: str


class Stragglers:
    """Looks at window after window, on rank 0."""

    def __init__(self) -> None:
        self._late: list[Late] = []
        self._told = -1

    def look(self, window: Sequence[Times]) -> Late | None:
        """Who is late in `window`, and was in the two before; a rank is named once, until another is late or none."""
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
    """The rank that takes longest for its own, if all lose much by it."""
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
