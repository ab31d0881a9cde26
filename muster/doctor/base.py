"""Interface between the doctor and its checks.

Every rank collects the facts that only it can see, as JSON; rank 0 judges the facts of all ranks. So the findings of a
check are a pure function of facts, and testing them needs no broken cluster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from muster.world.group import World

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """A problem.

    fails: True if training cannot work, False if it may be slow or unreliable. remedy: what to do.
    host: the host that has the problem, if it is one host's own; empty if it is between hosts, or of the job.
    """

    what: str
    remedy: str
    fails: bool = True
    host: str = ""


@dataclass(frozen=True)
class Visit:
    """Options of an examination.

    output_dir: folder that a run would write to. workers: loader workers per rank.
    expected: number of ranks expected; None: the launcher's number, if it is known. quick: True skips speed tests.
    """

    output_dir: str
    workers: int = 0
    expected: int | None = None
    quick: bool = False


class Check:
    """Base class of checks. Subclasses in checks/ are discovered automatically."""

    name: ClassVar[str]
    slow: ClassVar[bool] = False
    """True if the check takes seconds; a quick visit skips it."""

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        """Return this rank's facts. May be collective: every rank calls it."""
        raise NotImplementedError

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        """Return the findings from all ranks' facts, in rank order; called on rank 0 only.

        The facts of each rank also have `rank`, `host` and `local_rank`.
        """
        raise NotImplementedError

    def summary(self, ranks: Sequence[Facts]) -> str:
        """Return a one-line summary of the facts."""
        return ""


def whereabouts(world: World) -> dict[str, Any]:
    """Return the facts that identify a rank. One machine may have several hosts: containers have their own names."""
    return {"rank": world.rank, "host": socket.gethostname(), "local_rank": int(os.environ.get("LOCAL_RANK", "0"))}


def by_value(ranks: Sequence[Facts], key: str) -> dict[Any, list[str]]:
    """Return value of `key` -> hosts with that value."""
    found: dict[Any, list[str]] = {}
    for facts in ranks:
        hosts = found.setdefault(facts.get(key), [])
        if facts["host"] not in hosts:
            hosts.append(facts["host"])
    return found


def one_a_host(ranks: Sequence[Facts]) -> list[Facts]:
    return list({facts["host"]: facts for facts in reversed(ranks)}.values())[::-1]


def outliers(values: Mapping[str, float], *, factor: float) -> list[str]:
    """Return the names whose value is below the median divided by `factor`. Slow values do not move the median."""
    ordered = sorted(values.values())
    middle = ordered[len(ordered) // 2] if ordered else 0.0
    return [name for name, value in values.items() if value * factor < middle]
