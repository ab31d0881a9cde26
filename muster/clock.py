"""The time, as an object that a test can replace."""

from __future__ import annotations

import threading
import time


class SystemClock:
    """The system's clocks. Code that waits takes an instance, so that a test can move the time by hand."""

    def monotonic(self) -> float:
        """Return seconds on a clock that is never set back."""
        return time.monotonic()

    def time(self) -> float:
        """Return seconds since the epoch (UTC)."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Suspend the calling thread for `seconds`."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until `event` is set, at most `seconds`. Returns whether it is set."""
        return event.wait(seconds)


SYSTEM = SystemClock()
