"""Count of the bytes that a process has sent, by any library."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/self/io")


def written_bytes() -> int | None:
    """Return the bytes that this process has passed to write(2) and similar calls, which gloo uses; None if unknown.

    Source: proc_pid_io(5), wchar.
    """
    try:
        counters = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    except OSError:
        return None
    return int(counters["wchar"])
