"""Kill a rank where it runs: in a container, on a node of Slurm, in a pod."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path


def kill_rank(number: int, *marks: str) -> None:
    """Send SIGKILL to a rank, among all processes of this machine.

    Args:
        number: its number.
        marks: texts of which one is in its environment or in the name of its control group, such as a container's id.
    """
    found = [int(entry.name) for entry in Path("/proc").iterdir() if _is_rank(entry, f"muster-rank{number}", marks)]
    assert found, f"no rank {number} with one of {marks}"
    os.kill(min(found, key=_age), signal.SIGKILL)  # the oldest: its loader workers have its name


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def started(pid: int) -> int:
    """Return when a process has started, in ticks since the system has. Its number says nothing: the system counts in a circle."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _age(pid: int) -> float:
    try:
        return started(pid)
    except OSError:  # it has ended
        return float("inf")


def _is_rank(entry: Path, name: str, marks: Sequence[str]) -> bool:
    try:
        if not entry.name.isdigit() or (entry / "comm").read_text().strip() != name:
            return False
        group = (entry / "cgroup").read_text().replace("_", "-")
        environment = (entry / "environ").read_bytes()
        return any(mark in group or mark.encode() in environment for mark in marks)
    except OSError:  # it has ended
        return False
