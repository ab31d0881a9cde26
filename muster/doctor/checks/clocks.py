"""Check that the hosts' clocks are within `MOST_S` seconds of their median, which the comparison of logs relies on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, one_a_host
from muster.world.group import World

MOST_S = 2.0


class Clocks(Check):
    name = "clocks"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        world.sum([0.0])  # all ranks leave this collective within a few milliseconds
        return {"time": time.time()}

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        hosts = one_a_host(ranks)
        middle = sorted(facts["time"] for facts in hosts)[len(hosts) // 2]
        off = {facts["host"]: facts["time"] - middle for facts in hosts if abs(facts["time"] - middle) > MOST_S}
        if not off:
            return []
        said = ", ".join(f"{host} by {seconds:+.1f} s" for host, seconds in off.items())
        return [Finding(f"clocks differ: {said}", "start chronyd or ntpd there", fails=False)]

    def summary(self, ranks: Sequence[Facts]) -> str:
        times = [facts["time"] for facts in ranks]
        return f"within {max(times) - min(times):.2f} s"
