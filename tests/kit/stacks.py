"""Where the processes of a test stand, for the message of one that did not end in time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MOST, MOST_S = 24, 10.0


def stacks() -> str:
    """Return the Python stacks of the processes that this one has started, and of their children, where they can be read."""
    try:
        import psutil  # in a container of the tests, where the kit is imported, too, there is none
    except ImportError:
        return ""
    return "\n".join(_stack(child.pid) for child in psutil.Process().children(recursive=True)[:MOST])


def _stack(pid: int) -> str:
    line = [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(line, capture_output=True, text=True, timeout=MOST_S).stdout
    return ""


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """End a test that takes too long with the stacks of its processes; pytest-timeout shows its own threads alone."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None

    def late(*_: object) -> None:
        import pytest

        pytest.fail(f"no end within {settings.timeout:g} s:\n{stacks()}")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # which pytest-timeout calls
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
