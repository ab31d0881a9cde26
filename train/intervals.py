"""Log lines and checkpoints at intervals in seconds. All ranks follow rank 0's clock, and look at it as rarely as they can."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from muster.train.progress import Progress
from muster.world.group import World

GROWTH = 10
"""The most times as many steps as an attempt has made until the next look: its first steps are slow."""


class Intervals:
    """Decides what is due by the clock.

    After some steps the ranks look at rank 0's clock: what is due after this step, and after which step they look again,
    which is estimated from the speed. The answer is part of the progress, so a rank that is restarted in place has it.

    Args:
        clock: returns seconds. intervals: seconds, by what is due; None: not by the clock.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **intervals: float | None):
        self._intervals = {name: seconds for name, seconds in intervals.items() if seconds is not None}
        self._clock, self._began = clock, clock()
        self._first: int | None = None
        self._is_fresh = True
        self._last = dict.fromkeys(self._intervals, self._began)

    def look(self, world: World, progress: Progress) -> None:
        """Put into `progress` what is due after its step. Collective: every rank must call it after each step."""
        if not self._intervals:
            return
        if self._first is None:
            self._first, self._began = progress.step, self._clock()
        if progress.timed is None:  # before the first step of a launch
            progress.timed = {"again_at": progress.step + 1}
        elif progress.step >= progress.timed["again_at"]:
            progress.timed = world.on_first(partial(self.decide, progress.step))

    def is_due(self, name: str, progress: Progress) -> bool | None:
        """Return whether `name` is due after this step; None if its interval is not in seconds."""
        if name not in self._intervals or progress.timed is None:
            return None if name not in self._intervals else False
        return progress.timed.get("step") == progress.step and bool(progress.timed[name])

    def decide(self, step: int) -> dict[str, int]:
        """Return what is due after `step`, as 0 or 1 by name, and after which step to look again: `again_at`."""
        now = self._clock()
        made = max(1, step - (self._first or 0))
        step_s = max(1e-6, (now - self._began) / made)
        if self._is_fresh:  # the first step, which is slow, does not count for the speed
            self._first, self._began, self._is_fresh = step, now, False
        due = {name: now - self._last[name] >= seconds for name, seconds in self._intervals.items()}
        self._last |= {name: now for name in due if due[name]}
        left_s = min(self._last[name] + seconds - now for name, seconds in self._intervals.items())
        again_at = step + min(max(1, int(left_s / step_s)), GROWTH * made)
        return {"step": step, "again_at": again_at, **{name: int(is_due) for name, is_due in due.items()}}
