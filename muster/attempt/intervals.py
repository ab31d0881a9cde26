"""When lines, evaluations and checkpoints are due: by the step, or by rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from muster.world.group import World

GROWTH = 10
"""The most times as many steps as an attempt has made until the next look: its first steps are slow."""


class Every(NamedTuple):
    """An interval in steps (0: never), or in seconds if it is given in them."""

    steps: int
    seconds: float | None = None


class Timed(Protocol):
    """A progress; `timed` is what is due by the clock, so a rank that is restarted in place has it."""

    step: int
    timed: dict[str, int] | None


class Intervals:
    """Decides what is due after a step.

    With intervals in seconds, the ranks look at rank 0's clock as rarely as they can: each look also sets the step of the next one,
    estimated from the speed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **every: Every):
        self._every = every
        self._seconds = {name: each.seconds for name, each in every.items() if each.seconds is not None}
        self._clock, self._began = clock, clock()
        self._first: int | None = None
        self._is_fresh = True
        self._last = dict.fromkeys(self._seconds, self._began)

    def look(self, world: World, progress: Timed) -> None:
        """Put into `progress` what is due by the clock after its step. Collective, after each step."""
        if not self._seconds:
            return
        if self._first is None:
            self._first, self._began = progress.step, self._clock()
        if progress.timed is None:  # before the first step of a launch
            progress.timed = {"again_at": progress.step + 1}
        elif progress.step >= progress.timed["again_at"]:
            progress.timed = world.on_first(partial(self.decide, progress.step))

    def is_due(self, name: str, progress: Timed) -> bool:
        if name in self._seconds:
            timed = progress.timed or {}
            return timed.get("step") == progress.step and bool(timed[name])
        return self._every[name].steps > 0 and progress.step % self._every[name].steps == 0

    def decide(self, step: int) -> dict[str, int]:
        """Return what is due after `step`, 0 or 1 by name, and the step of the next look, `again_at`."""
        now = self._clock()
        made = max(1, step - (self._first or 0))
        step_s = max(1e-6, (now - self._began) / made)
        if self._is_fresh:  # the first step, which is slow, does not count for the speed
            self._first, self._began, self._is_fresh = step, now, False
        due = {name: now - self._last[name] >= seconds for name, seconds in self._seconds.items()}
        self._last |= {name: now for name in due if due[name]}
        left_s = min(self._last[name] + seconds - now for name, seconds in self._seconds.items())
        again_at = step + min(max(1, int(left_s / step_s)), GROWTH * made)
        return {"step": step, "again_at": again_at, **{name: int(is_due) for name, is_due in due.items()}}
