"""Connect this process to the others: rendezvous store, gloo's network interface, and the file descriptor limit."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import Store, TCPStore

from muster.errors import ConfigError, Preempted, RankLost, one_line, say
from muster.process import is_supervised
from muster.world.environment import Environment
from muster.world.rendezvous import port as port_of_store
from muster.world.rendezvous.interfaces import interface_to, own_address
from muster.world.store_keys import CLIENTS, StoreKeys

SPARE_DESCRIPTORS = 128  # files, pipes of loader workers, libraries
WATCH_S = 0.05
HOSTED_S = 300.0
"""How long a host of the store waits for its own answer: on a starved machine it takes seconds, and the ranks have timeouts."""
STOP_S = 10.0
"""How long a rank that was told to stop waits for the others to learn of it; launchers kill after 30 s."""
_hosted: list[TCPStore] = []
"""The store that this process hosts, as long as it lives: another run in the same processes meets there, too."""


class Unheard(ConfigError):
    """This rank never reached the others, so it must report its error itself."""


class Abandoned(RankLost):
    """The process that holds the store was lost during the meeting, so this rank must report the error itself."""

    def __init__(self, environment: Environment):
        who = f"rank {environment.rank} on {socket.gethostname()}"
        at = f"the rendezvous store at {environment.store_at}"
        super().__init__(f"{who} lost {at} while the ranks met: see the log of the node that held it")


class Stopped(Preempted):
    """A rank was told to stop before the ranks had met. Nothing was begun, so nothing had to be saved."""

    def __init__(self) -> None:
        super().__init__("told to stop while the ranks were still meeting: run the same command again to resume")


def connect(environment: Environment, *, timeout_s: float, stopping: Callable[[], bool]) -> Store:
    """Return a client of the rendezvous store, which rank 0 hosts unless torchrun's agent does.

    Raises Unheard: no store answers at the address. Raises RankLost: the port is taken, and torchrun can choose another.
    Raises Stopped: this process was told to stop meanwhile.
    """
    host = _resolved(os.environ["MASTER_ADDR"], environment)
    address = f"{host}:{os.environ['MASTER_PORT']}"
    hosts = environment.hosts_store and not is_supervised() and not port_of_store.is_used()
    found: list[Store] = []
    reasons = [f"what listens there has not answered within dist.start_timeout_s={timeout_s:g} and may be no store"]

    def open_at_address() -> None:
        try:
            found.append(open_store_at(host, environment, timeout_s=timeout_s, hosts=hosts))
        except (RuntimeError, ValueError, OSError) as error:
            reasons.append(str(error).splitlines()[0][:200])

    thread = threading.Thread(
        target=open_at_address, daemon=True
    )  # TCPStore's timeout fails if a silent non-store listens
    thread.start()
    attend(thread, timeout_s=timeout_s + 2, stopping=stopping)
    if found:
        return found[0]
    if stopping():
        raise Stopped
    if os.strerror(errno.EADDRINUSE) in reasons[-1]:
        raise _in_use(os.environ["MASTER_PORT"])
    raise Unheard(
        f"rank {environment.rank} cannot reach the rendezvous store at {address}: {reasons[-1]}; is rank 0 up, and the port free and open?"
    )


def open_store_at(host: str, environment: Environment, *, timeout_s: float, hosts: bool) -> Store:
    """Open the store at `host` and MASTER_PORT, as a client or, if this process `hosts` it, as its server.

    Raises RuntimeError, ValueError, OSError.
    """
    port = int(os.environ["MASTER_PORT"])
    at = (
        (port_of_store.use() or port_of_store.listener(host, port, is_one_node=environment.is_one_node))
        if hosts
        else None
    )
    # As env:// does, but without its wait for all clients: the meeting names the missing ranks.
    store = TCPStore(
        host,
        port,
        world_size=environment.world_size,
        is_master=hosts,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=at is None,
        master_listen_fd=at.detach() if at else None,
    )
    if hosts:
        _hosted.append(store)
        port_of_store.set_used()
    return store


def _in_use(port: str) -> Unheard | RankLost:
    """Return the error for a taken port. torchrun finds another one when it restarts the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return RankLost(
            f"MASTER_PORT={port} was free when torchrun chose it, and is in use by another process now: start again, as "
            "torchrun does if --max-restarts allows it"
        )
    return Unheard(f"MASTER_PORT={port} is in use by another process here: give another port to all ranks")


def store_for_supervisor() -> Callable[[], None] | None:
    """Return what hosts the store in a child of this process, a supervisor; None if another process hosts it."""
    return host_store if Environment.from_env().hosts_store and not port_of_store.is_used() else None


def host_store() -> None:
    """Host the store of rank 0 in this process, for its supervisor: it outlives the rank. Returns after an error, which it prints."""
    environment = Environment.from_env()
    try:
        store = open_store_at(
            _resolved(os.environ["MASTER_ADDR"], environment), environment, timeout_s=HOSTED_S, hosts=True
        )
    except (RuntimeError, ValueError, OSError, ConfigError) as error:
        say(f"muster: no rendezvous store at {environment.store_at}: {one_line(error)}")
        return
    while store:
        signal.pause()


def attend(
    thread: threading.Thread,
    *,
    timeout_s: float,
    stopping: Callable[[], bool],
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Wait until `thread`, which blocks on the store, ends; after a stop request wait at most `STOP_S` more.

    Calls `on_stop` at every poll after a stop request. Short waits on the store itself would notice signals too, but
    torch logs a warning for each wait that times out.
    """
    deadline, told = time.monotonic() + timeout_s, False
    while thread.is_alive() and time.monotonic() < deadline:
        if stopping():
            if not told:
                told, deadline = True, min(deadline, time.monotonic() + STOP_S)
            on_stop()
        thread.join(WATCH_S)


def check_descriptors(environment: Environment) -> None:
    """Ensure that this process may open a socket to each other rank and, if it hosts the store, to each store client.

    gloo connects every rank with every other. Raises the soft limit where the hard limit allows it.
    Raises ConfigError: the hard limit is too low.
    """
    if environment.world_size == 1:
        return
    needed = environment.world_size * (1 + CLIENTS * environment.hosts_store) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise ConfigError(
        f"ulimit -n is {hard} on {socket.gethostname()}, and {environment.world_size} ranks need {needed} file descriptors in rank "
        f"{environment.rank}, a socket to each other rank among them: raise it to at least ulimit -n {needed}"
    )


def read_addresses_at_once() -> None:
    """Have gloo read the addresses of all ranks by one request to the store, of one size for any number of ranks.

    Without its two variables each rank makes three requests per other rank, of a size that grows with the ranks, too: three
    million requests for 1,024 ranks. Variables that are set stay.
    """
    for name in ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"):
        os.environ.setdefault(name, "1")


def check_interface() -> None:
    """Raise ConfigError if GLOO_SOCKET_IFNAME names an interface that this host has not: no restart helps."""
    there = [name for _, name in socket.if_nameindex()]
    if strange := {*filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))} - {*there}:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME names {', '.join(sorted(strange))}, and {socket.gethostname()} has only {', '.join(there)}"
        )


def choose_interface(environment: Environment, store_keys: StoreKeys) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts, if the job spans nodes and it is not set. Collective.

    gloo uses the address that the host's own name resolves to, which on many systems is 127.0.1.1. NCCL, which takes the
    first interface that is up, gets the same one unless NCCL_SOCKET_IFNAME is set.
    """
    if environment.is_one_node or environment.shared_file:
        return
    found = interface_to(os.environ["MASTER_ADDR"], store_keys.exchange_address)
    if "GLOO_SOCKET_IFNAME" not in os.environ and found:
        os.environ["GLOO_SOCKET_IFNAME"] = found
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")  # "=": this name, not all that begin with it


def _resolved(host: str, environment: Environment) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        if not environment.is_one_node:
            raise Unheard(
                f"MASTER_ADDR={host} does not resolve ({error}): give an address that every node knows"
            ) from None
        return "127.0.0.1"  # the host cannot resolve its own name; all ranks are on it
    return host


OTHERS_S = 8.0
"""How long a rank waits for the others to fail as well, and then for them to finish their tests."""
CONNECT_S = 3.0
MOST = 64
"""Maximum number of hosts to test."""
SAID = 3


def closed(store_keys: StoreKeys) -> str:
    """Describe which hosts this rank cannot connect to, and the remedy; empty if nothing is known.

    The store needs one port of one host; gloo and NCCL connect every pair of hosts, at ports that the system chooses.

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
