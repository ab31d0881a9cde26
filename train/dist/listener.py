"""At which of this host's addresses a store listens: it authenticates nobody, so at no more of them than it has to."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket


def listener(host: str, port: int, *, is_one_node: bool = False) -> socket.socket | None:
    """A listening socket at the one address of `host`; None where the store is to listen on all interfaces.

    That is so where the name stands for several addresses, for one that is not this host's own (a service, a gateway),
    or, as on Debian, for 127.0.1.1 here and for another address everywhere else: a client could come by any of them.

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
                if error.errno != errno.EADDRNOTAVAIL:  # not this host's
                    raise
    return None
