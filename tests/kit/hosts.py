"""Two hosts on one machine: network namespaces with a link between them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

LINK = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAME_SERVERS = re.findall(r"(?m)^nameserver\s+([\d.]+)", Path("/etc/resolv.conf").read_text(encoding="utf-8"))


@contextlib.contextmanager
def two_hosts(
    *, mbit: int | None = None, blind: bool = False, default: bool = False, addresses: tuple[str, str] = ADDRESSES
) -> Iterator[list[str]]:
    """Give the names of two network namespaces, which root alone can make. mbit: the speed of the link in each direction.

    blind: give each host a second interface, `other`, that leads nowhere; default: with the default route, as of a VPN.
    addresses: of IPv4 or IPv6.
    """
    names = [f"muster-{os.getpid()}-{letter}" for letter in "ab"]
    a, b = names
    lines = [
        f"ip netns add {a}",
        f"ip netns add {b}",
        f"ip -n {a} link add {LINK} type veth peer name {LINK} netns {b}",
    ]
    for number, name in enumerate(names, 1):
        lines += [
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {addresses[number - 1]}/{'64 nodad' if ':' in addresses[0] else '24'} dev {LINK}",
            f"ip -n {name} link set {LINK} up",
        ]
        if blind:
            lines += [
                f"ip -n {name} link add other type veth peer name blind",
                f"ip -n {name} addr add 10.88.{number}.1/24 dev other",
                f"ip -n {name} link set other up",
                f"ip -n {name} link set blind up",
            ]
        if default:  # no answer is waited for from a name server that cannot be reached
            lines += [f"ip -n {name} route add unreachable {each}" for each in NAME_SERVERS if each[:4] != "127."]
            lines.append(f"ip -n {name} route add default dev other")
        if mbit:
            lines.append(f"tc -n {name} qdisc add dev {LINK} root tbf rate {mbit}mbit burst 256kb latency 50ms")
    try:
        for line in lines:
            subprocess.run(line.split(), check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def inside(host: str, *line: str) -> list[str]:
    """Return the command `line` for `host`."""
    return ["nsenter", f"--net=/run/netns/{host}", *line]


def named(host: str, name: str, known: Path, *line: str) -> list[str]:
    """Return the command `line` for `host` under a host's name of its own, with the file `known` as its /etc/hosts."""
    own = f'hostname {name} && mount --bind {shlex.quote(str(known))} /etc/hosts && exec "$@"'
    return inside(host, "unshare", "--uts", "--mount", "bash", "-c", own, "bash", *line)


def sent(host: str) -> int:
    """Return the bytes that `host` has sent over the link."""
    done = subprocess.run(
        inside(host, "cat", "/proc/net/dev"), check=True, capture_output=True, text=True
    )  # /sys shows the namespace that mounted it
    fields = (
        next(line for line in done.stdout.splitlines() if line.strip().startswith(f"{LINK}:")).split(":")[1].split()
    )
    return int(fields[8])
