"""Find hosts that cannot connect to each other, after all ranks met at the store but could form no process group.

The store needs one port of one host; gloo and NCCL connect every pair of hosts, at ports that the system chooses.
"""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

from muster.world.rendezvous.interfaces import own_address
from muster.world.store_keys import StoreKeys

OTHERS_S = 8.0
"""How long a rank waits for the others to fail as well, and then for them to finish their tests."""
CONNECT_S = 3.0
MOST = 64
"""Maximum number of hosts to test."""
SAID = 3


def closed(store_keys: StoreKeys) -> str:
    """Describe which hosts this rank cannot connect to, and the remedy; empty if nothing is known.

    Every rank that got no process group calls it. It takes at most `2 x OTHERS_S + CONNECT_S` seconds.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):
        own = own_address(os.environ["MASTER_ADDR"])
        with socket.create_server(
            (own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET, backlog=store_keys.size
        ) as listener:
            store_keys.post_reach(f"{socket.gethostname()} {own} {listener.getsockname()[1]}")
            others = store_keys.reaches(OTHERS_S)
            hosts = {text.split()[1]: (rank, *text.split()) for rank, text in sorted(others.items(), reverse=True)}
            hosts.pop(own, None)
            targets = sorted(hosts.values())[:MOST]
            with ThreadPoolExecutor(max(1, len(targets))) as pool:
                answers = list(pool.map(lambda target: answers_at(target[2], int(target[3])), targets))
            store_keys.reached(OTHERS_S)
        shut = [target for target, is_open in zip(targets, answers, strict=True) if not is_open]
        if shut:
            told = ", ".join(f"rank {rank} on {host} ({address})" for rank, host, address, _ in shut[:SAID])
            more = f" and {len(shut) - SAID} more" if len(shut) > SAID else ""
            return (
                f"{socket.gethostname()} ({own}) cannot open a connection to {told}{more}: open all ports between the nodes, or name "
                "the interface that leads there in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
    return ""


def answers_at(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return True
    except OSError:
        return False
