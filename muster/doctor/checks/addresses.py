"""Check that MASTER_ADDR is one host for all and not loopback, and that own names and MTUs fit."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, by_value, one_a_host
from muster.world.group import World
from muster.world.rendezvous.interfaces import is_loopback


class Addresses(Check):
    name = "addresses"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        master = os.environ.get("MASTER_ADDR", "")
        return {
            "master": master,
            "master_is": resolved(master),
            "own": resolved(socket.gethostname()),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "mtus": mtus(),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        hosts = one_a_host(ranks)
        if len(hosts) == 1:
            return []
        found: list[Finding] = []
        if loops := [facts["host"] for facts in hosts if any(map(is_loopback, facts["master_is"]))]:
            found.append(
                Finding(
                    f"MASTER_ADDR={ranks[0]['master']} is loopback on {', '.join(loops)}, and there are {len(hosts)} hosts",
                    "give the first node's own name or address",
                )
            )
        if nameless := [facts["host"] for facts in hosts if facts["master"] and not facts["master_is"]]:
            found.append(
                Finding(
                    f"MASTER_ADDR={ranks[0]['master']} has no address on {', '.join(nameless)}",
                    "give an address, or add the name to DNS or /etc/hosts",
                )
            )
        answers = {tuple(facts["master_is"]): facts["host"] for facts in hosts if facts["master_is"]}
        if len(answers) > 1:
            each = "; ".join(f"{', '.join(addresses)} on {host}" for addresses, host in answers.items())
            found.append(
                Finding(
                    f"MASTER_ADDR={ranks[0]['master']} is not one host: {each}", "give an address in place of a name"
                )
            )
        if own := [
            facts["host"]
            for facts in hosts
            if facts["own"] and all(map(is_loopback, facts["own"])) and not facts["interface"]
        ]:
            found.append(
                Finding(
                    f"the host name of {', '.join(own)} resolves to a loopback address, which gloo would announce to other hosts",
                    "set GLOO_SOCKET_IFNAME to the interface between nodes, or fix /etc/hosts",
                    fails=False,
                )
            )
        for name in sorted({name for facts in hosts for name in facts["mtus"]} - {"lo"}):
            sizes = by_value([{**facts, "mtu": facts["mtus"][name]} for facts in hosts if name in facts["mtus"]], "mtu")
            if len(sizes) > 1:
                said = "; ".join(f"{size} on {', '.join(names)}" for size, names in sizes.items())
                remedy = "packets of the larger may be lost: set them alike"
                found.append(Finding(f"the MTU of {name} differs: {said}", remedy, fails=False))
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        return f"MASTER_ADDR={ranks[0]['master'] or 'none'} ({', '.join(ranks[0]['master_is']) or 'no address'})"


def resolved(name: str) -> list[str]:
    try:
        return (
            sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
            if name
            else []
        )
    except OSError:
        return []


def mtus() -> dict[str, int]:
    """Return the MTU of each interface in bytes. Linux only."""
    found = {
        path.parent.name: path.read_text(encoding="utf-8").strip() for path in Path("/sys/class/net").glob("*/mtu")
    }
    return {name: int(size) for name, size in found.items() if size.isdigit()}
