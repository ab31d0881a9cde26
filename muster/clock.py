"""The system's clocks as an object. Code that waits takes one, so that a test can move the time by hand."""

from __future__ import annotations

import threading
import time


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until `event` is set, at most `seconds`. Returns whether it is set."""
        return event.wait(seconds)


SYSTEM = SystemClock()
