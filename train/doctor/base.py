"""The seam between the doctor and its checks.

Every rank looks at what it alone can see and gives facts, which are JSON; rank 0 judges all of them. So what a check
finds is a pure function of facts, and a test needs no broken cluster to see it found.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from train.dist.world import World

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something wrong. `fails`: training cannot work so; otherwise it works, slowly or by luck. remedy: what to do."""

    what: str
    remedy: str
    fails: bool = True


@dataclass(frozen=True)
class Visit:
    """What the doctor was asked.

    output_dir: the folder that a run would write to. workers: of the loader, a rank.
    expected: how many ranks there should be; None: as many as came. quick: no speed tests.
    """

    output_dir: str
    workers: int = 0
    expected: int | None = None
    quick: bool = False


class Check:
    """One thing that has to be right. A subclass in checks/ is found by itself."""

    name: ClassVar[str]
    slow: ClassVar[bool] = False
    """Whether it takes seconds, and is left out of a quick visit."""

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        """What this rank sees. Collective, if it has to be."""
        raise NotImplementedError

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        """What is wrong, of all ranks' facts in their order; each has `rank`, `host` and `local_rank` too. On rank 0."""
        raise NotImplementedError

    def summary(self, ranks: Sequence[Facts]) -> str:
        """One line of what was seen."""
        return ""


def whereabouts(world: World) -> dict[str, Any]:
    """What every rank's facts begin with. A host may be several nodes: containers have names of their own."""
    return {"rank": world.rank, "host": socket.gethostname(), "local_rank": int(os.environ.get("LOCAL_RANK", "0"))}


def by_value(ranks: Sequence[Facts], key: str) -> dict[Any, list[str]]:
    """The hosts with each value of `key`."""
    found: dict[Any, list[str]] = {}
    for facts in ranks:
        hosts = found.setdefault(facts.get(key), [])
        if facts["host"] not in hosts:
            hosts.append(facts["host"])
    return found


def one_a_host(ranks: Sequence[Facts]) -> list[Facts]:
    """The facts of the first rank of each host."""
    return list({facts["host"]: facts for facts in reversed(ranks)}.values())[::-1]


def outliers(values: Mapping[str, float], *, factor: float) -> list[str]:
    """The names whose value is below the median's `factor`-th part; robust, for the slow do not move a median."""
    ordered = sorted(values.values())
    middle = ordered[len(ordered) // 2] if ordered else 0.0
    return [name for name, value in values.items() if value * factor < middle]
