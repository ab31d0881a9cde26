"""Choose the address at which a store listens. A store authenticates no client, so it listens at as few as possible."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket


def listener(host: str, port: int, *, is_one_node: bool = False) -> socket.socket | None:
    """Return a listening socket at the only address of `host`; None if the store must listen on all interfaces.

    The store must listen on all interfaces if the name resolves to several addresses, to an address of another host (a
    service, a gateway) or, as on Debian, to 127.0.1.1 here and to another address everywhere else: a client may use any
    of them.

    Raises:
        OSError: the port is taken.
    """
    with contextlib.suppress(socket.gaierror):
        found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        loopback = {address for address in found if ipaddress.ip_address(str(address)).is_loopback}
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
