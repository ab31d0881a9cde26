"""The network interface that leads to the other hosts. Without torch, and without the kit: torchrun.py loads it by its path."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

SIOCGIFADDR = 0x8915
GLOBAL = "00"
"""The scope in /proc/net/if_inet6 of an address that other hosts may use."""


def own_address(master: str) -> str:
    """Return the address of GLOO_SOCKET_IFNAME, else of the interface that leads to `master`. Raises OSError if there is none."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of(name.split(",")[0])
    return _source(master)


def interface_to(master: str, exchange: Callable[[str], str]) -> str:
    """Return the name of the interface that leads to the other hosts; empty if that is not known.

    It is the one that leads to `master`, a name or an address of the first host. On that host the name may lead to the loopback
    interface, as 127.0.1.1 does on Debian: it takes the interface that leads to an address by which another host reaches it.

    `exchange` posts this host's address for the others and returns it; for "" it waits and returns the first address that another
    one posts, or "" if all have called and none has. It may raise OSError or RuntimeError.
    """
    with contextlib.suppress(OSError, RuntimeError):
        address = own_address(master)
        if not _is_local(master):
            other = exchange("" if is_loopback(address) else address)
            address = _source(other) if other and is_loopback(address) else address
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


def is_known_as_loopback() -> bool:
    """Return whether gloo may announce a loopback address to other hosts: this host's name resolves to one, or not at all."""
    try:
        return any(is_loopback(str(info[4][0])) for info in socket.getaddrinfo(socket.gethostname(), None))
    except OSError:
        return True


def _is_local(host: str) -> bool:
    """Whether `host` is a loopback address as it is written: then all processes are on this machine."""
    with contextlib.suppress(ValueError):
        return is_loopback(host.strip("[]"))
    return host == "localhost"


def _source(host: str) -> str:
    """Return the address from which this host sends to `host`, of several not a loopback one, then IPv4. Raises OSError."""
    error, found = OSError(f"no route to {host}"), []
    for family, kind, _, _, at in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(at)  # connect() on UDP sends nothing; it only looks up the route
                found.append(str(probe.getsockname()[0]))
        except OSError as refused:
            error = refused
    if not found:
        raise error
    return min(found, key=lambda address: (is_loopback(address), ":" in address))


def _address_of(interface: str) -> str:
    found = next((address for name, address in addresses() if name == interface), "")
    if not found:
        raise OSError(f"{interface} has no address")
    return found


def _ipv4(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
    return socket.inet_ntoa(reply[20:24])
