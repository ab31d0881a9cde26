"""Calls between ranks by torch.distributed.rpc, which only the strategies with a server import.

RPC is in maintenance upstream and slower than collectives. Its agents meet over the existing rendezvous store, under
the attempt's own keys, so a restart never reads a dead agent's address.

Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

from muster.errors import RankLost
from muster.world.environment import Environment
from muster.world.group import World
from muster.world.timeouts import LAST_RESORT_S

CLOSE_S = 60.0
_left: Future[None] = Future()


def start(world: World) -> None:
    """Start this rank's RPC agent, which answers calls from now on. Collective."""
    _choose_interface(world.environment)
    scheme, store = f"board-{world.attempt}", world.store_keys.rpc_store()
    found = (store, world.rank, world.size)
    dist.register_rendezvous_handler(scheme, lambda url: iter([found]))  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{scheme}://", rpc_timeout=LAST_RESORT_S)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of its older interface
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=options
        )


def name(rank: int) -> str:
    """Return the name of the RPC agent of `rank`."""
    return f"rank{rank}"


def answer(future: Future[Any], *, rank: int) -> Any:
    """Wait for the result of a call to `rank`. Raises RankLost if the rank is gone, or the error of the call."""
    return attempt(future.wait, rank=rank)


def attempt(ask: Callable[[], Any], *, rank: int) -> Any:
    """Return the result of `ask`, which needs `rank`. Raises RankLost if the rank is gone."""
    try:
        return ask()
    except RuntimeError as error:
        if "tensorpipe" not in str(error):
            raise
        raise gone(rank) from error


def gone(rank: int) -> RankLost:
    """Return the error for a `rank` that has left without notice."""
    return RankLost(
        f"rank {rank} has closed its connection: it was killed, or its own log says why it ended", rank=rank
    )


def watch(rank: int, on_lost: Callable[[int], object]) -> None:
    """Call `on_lost(rank)`, in a thread of the agent, when `rank` is gone without having left in order.

    A broken connection fails only the calls that wait on it, so this keeps one call waiting.
    """

    def ended(call: Future[None]) -> None:
        try:
            call.value()
        except RuntimeError:
            on_lost(rank)

    rpc.rpc_async(name(rank), _until_left, timeout=0).add_done_callback(ended)


def close() -> None:
    """Leave in order; afterwards no rank may make calls. Collective."""
    _left.set_result(None)
    rpc.shutdown(timeout=CLOSE_S)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _until_left() -> Future[None]:
    return _left


def _choose_interface(environment: Environment) -> None:
    """Set TP_SOCKET_IFNAME: by default TensorPipe, like gloo, uses the address that the host's name resolves to."""
    has_loopback = any(name == "lo" for _, name in socket.if_nameindex())
    loopback = "lo" if environment.is_one_node and has_loopback else None
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", loopback):
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
