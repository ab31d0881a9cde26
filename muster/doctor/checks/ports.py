"""Check of the ports that ranks may listen on: each host has free ones, as each rank has several connections to every other.

The port range and MASTER_PORT must be the same on all hosts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, by_value, one_a_host
from muster.world.group import World

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST = 1000
"""Minimum number of free ports of a host."""


class Ports(Check):
    name = "ports"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        first, last = map(int, RANGE.read_text(encoding="utf-8").split())
        return {
            "range": f"{first} to {last}",
            "free": last - first + 1 - len([port for port in listened() if first <= port <= last]),
            "master": os.environ.get("MASTER_PORT", ""),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found: list[Finding] = []
        hosts = one_a_host(ranks)
        for facts in hosts:
            if facts["free"] < LEAST:
                said = f"{facts['host']}: {facts['free']} ports are free of {facts['range']}"
                found.append(
                    Finding(
                        said,
                        "widen net.ipv4.ip_local_port_range, or end what holds them",
                        fails=facts["free"] < len(ranks),
                        host=facts["host"],
                    )
                )
        each = by_value(hosts, "range")
        if len(each) > 1:
            said = "; ".join(f"{ports} on {', '.join(names)}" for ports, names in each.items())
            remedy = "a firewall between nodes has to leave open all that any of them listens at"
            found.append(Finding(f"net.ipv4.ip_local_port_range differs: {said}", remedy, fails=False))
        if len(each := by_value(hosts, "master")) > 1:
            said = "; ".join(f"{port or 'none'} on {', '.join(names)}" for port, names in each.items())
            found.append(Finding(f"MASTER_PORT differs: {said}", "give all nodes the same"))
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        return f"{ranks[0]['range']}, MASTER_PORT={ranks[0]['master'] or 'none'}"


def listened() -> set[int]:
    """Return the TCP ports of this host that are in use."""
    found = set[int]()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []
        found |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return found
