"""Wait for a condition; all waits of the tests are here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kit.stacks import stacks


def await_writer() -> None:
    """Wait until this process has written the checkpoint of its last save, or has failed to."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def until(
    condition: Callable[[], Any],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.02,
    said: Callable[[], str] = lambda: "",
) -> float:
    """Wait until `condition` is true; return the seconds.

    Raises:
        AssertionError: it did not become true; with the output of `said` and the stacks of all processes.
    """
    began = time.monotonic()
    while True:
        is_late = time.monotonic() - began > timeout_s  # looked at first: this process may stall before the condition
        if condition():
            return time.monotonic() - began
        if is_late:
            where = stacks()  # before `said`, which may end them
            raise AssertionError(f"no {what} within {timeout_s} s:\n{said()[-8000:]}\n{where}")
        time.sleep(every_s)
