"""The port at which rank 0 hosts the rendezvous store, taken as soon as its process runs.

torchrun's agent looks for a free port, closes it again, and gives its number to the ranks; until rank 0 listens there,
any other process may get it. The imports in between take seconds, the first lines of a process some 50 ms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from muster.errors import ConfigError
from muster.world.environment import Environment
from muster.world.rendezvous.interfaces import is_loopback

_ports: dict[tuple[str, str], socket.socket] = {}
"""This process's own (MASTER_ADDR, MASTER_PORT), with the socket until a store listens with it, here or in a child."""
_used: set[tuple[str, str]] = set()
"""Those at which a store listens, here or in a child."""


def hold() -> bool:
    """Listen at the store's port, if this process is to host the store. Returns False if another process has the port."""
    try:
        environment = Environment.from_env()
        if environment.hosts_store and _key() not in _ports and not is_used():
            host, port = _key()
            if at := listener(host, int(port), is_one_node=environment.is_one_node):
                _ports[host, port] = at
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    except (ConfigError, ValueError):  # which the meeting reports
        pass
    return True


def held() -> list[int]:
    """Return the file descriptors of the ports that no store uses yet."""
    return [at.fileno() for at in _ports.values()]


def use() -> socket.socket | None:
    """Return the socket that `hold` has opened, for a store that listens with it from now on; None if there is none."""
    return _ports.pop(_key(), None)


def set_used() -> None:
    _used.add(_key())


def give_away() -> None:
    """Close the port here: a child of this process has its store."""
    if at := use():
        at.close()
    set_used()


def is_used() -> bool:
    """Return whether this process or a child of it hosts the store: the runs of a sweep meet there one after the other."""
    return _key() in _used


def _key() -> tuple[str, str]:
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def listener(host: str, port: int, *, is_one_node: bool = False) -> socket.socket | None:
    """Return a listening socket at the only address of `host`; None if the store must listen on all interfaces.

    It must if the name resolves to several addresses, to an address of another host (a service, a gateway) or, as on Debian,
    to 127.0.1.1 here and to another address everywhere else: a client may use any of them.

    Raises OSError: the port is taken.
    """
    with contextlib.suppress(socket.gaierror):
        found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        loopback = {address for address in found if is_loopback(str(address))}
        if loopback and (is_one_node or host in found or host == "localhost"):
            found = {address: found[address] for address in sorted(loopback, key=lambda each: ":" in str(each))[:1]}
        elif loopback:
            return None
        if len(found) == 1:
            ((address, family),) = found.items()
            try:
                return socket.create_server((str(address), port), family=family, backlog=4096)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # EADDRNOTAVAIL: another host's address
                    raise
    return None
