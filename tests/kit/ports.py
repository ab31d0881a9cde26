"""Ports for what the tests start."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from functools import cache
from typing import IO

BELOW = 20000
"""Under the ports that the system gives to sockets (from 32768 on Linux), which others take in the meantime."""
_given: set[int] = set()


@cache
def _locks() -> IO[str]:
    """The file whose byte N is locked by the pytest that was given port N; of each user."""
    return open(f"/tmp/muster-test-ports-{os.getuid()}", "w")


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, and that neither the system nor another pytest gives to anybody."""
    while True:
        port = random.SystemRandom().randrange(BELOW - 8000, BELOW)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
