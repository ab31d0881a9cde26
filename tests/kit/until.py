"""Wait for a condition; all waits of the tests are here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(
    condition: Callable[[], Any],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.02,
    said: Callable[[], str] = lambda: "",
) -> float:
    """Wait until `condition` is true; return the seconds. Raises AssertionError with the output of `said`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"no {what} within {timeout_s} s:\n{said()[-8000:]}")
        time.sleep(every_s)
    return time.monotonic() - began
