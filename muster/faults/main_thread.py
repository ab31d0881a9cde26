"""Seconds that the main thread has been stuck at one instruction, not counting waits for threads of its own process.

A thread that waits in C, as for a device whose collective never ends, runs no signal handler: SIGTERM does not end it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from muster.clock import SYSTEM, SystemClock

OWN_THREADS = threading.__file__
"""Waits for a lock or a thread, such as the checkpoint writer; signal handlers run there."""

Place = tuple[int, int] | None


class Stillness:
    def __init__(self, *, place: Callable[[], Place] | None = None, clock: SystemClock = SYSTEM):
        self._place, self.clock = place or main_thread, clock
        self._last: tuple[Place, int] = (None, -1)
        self._since = self.clock.monotonic()

    def seconds(self, phase: int) -> float:
        """Return how long all calls have found the main thread at one place in phase number `phase`."""
        here, now = self._place(), self.clock.monotonic()
        if here is None or (here, phase) != self._last:
            self._last, self._since = (here, phase), now
        return now - self._since


def main_thread() -> Place:
    """Return the main thread's frame and instruction; None if it waits for a thread of this process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename == OWN_THREADS:
        return None
    return id(frame), frame.f_lasti
