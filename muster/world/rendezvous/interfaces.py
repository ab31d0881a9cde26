"""The network interface that leads to the other hosts. Without torch: the launcher asks for it, too."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
GLOBAL = "00"
"""The scope in /proc/net/if_inet6 of an address that other hosts may use."""
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the route to them is the default route."""


def own_address(master: str) -> str:
    """Return the address of GLOO_SOCKET_IFNAME, or of the interface that leads to `master`. Raises OSError if there is none.

    The master's own name may lead to itself by the loopback interface, as 127.0.1.1 does on Debian. Its address is then that
    of the default route, or of the first other interface that has one.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of(name.split(",")[0])
    found = _source(master)
    if not is_loopback(found) or _is_local(master):
        return found
    for target in ELSEWHERE:
        with contextlib.suppress(OSError):
            return _source(target)
    return next((address for _, address in addresses() if not is_loopback(address)), found)


def interface_to(master: str) -> str:
    """Return the name of the interface that leads to `master`; empty if that is not known."""
    with contextlib.suppress(OSError):
        address = own_address(master)
        return next((name for name, each in addresses() if each == address), "")
    return ""


def addresses() -> list[tuple[str, str]]:
    """Return the interfaces with their addresses that other hosts may use: each one's first of IPv4, and all of IPv6."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found.append((name, _ipv4(name)))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == GLOBAL:
                found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def is_loopback(address: str) -> bool:
    """Return True for a loopback address; a zone (`%eth0`) is ignored."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def knows_itself_as_loopback() -> bool:
    """Return whether this host's own name, which gloo announces to other hosts, has loopback addresses alone, or none."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return True
    return all(map(is_loopback, found))


def _is_local(host: str) -> bool:
    """Whether `host` is a loopback address as it is written: then all processes are on this machine."""
    with contextlib.suppress(ValueError):
        return is_loopback(host.strip("[]"))
    return host == "localhost"


def _source(host: str) -> str:
    """Return the address from which this host sends to `host`. Raises OSError if there is no route."""
    error: OSError = OSError(f"no route to {host}")
    for family, kind, _, _, at in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(at)  # connect() on UDP sends nothing; it only looks up the route
                return str(probe.getsockname()[0])
        except OSError as refused:
            error = refused
    raise error


def _address_of(interface: str) -> str:
    """Return the first address of `interface`. Raises OSError if it has none."""
    found = next((address for name, address in addresses() if name == interface), "")
    if not found:
        raise OSError(f"{interface} has no address")
    return found


def _ipv4(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
    return socket.inet_ntoa(reply[20:24])
