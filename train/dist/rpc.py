"""Calls from rank to rank by torch.distributed.rpc, which only the strategies on a server import.

It is in maintenance upstream and slower than collectives. Its agents meet over the rendezvous store that is there, under
the attempt's own keys, so that a restart never reads a dead agent's address.

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

from train.dist.place import Place
from train.dist.world import LAST_RESORT_S, World
from train.errors import RankLost

CLOSE_S = 60.0
_left: Future[None] = Future()


def start(world: World) -> None:
    """Start this rank's agent, which answers calls from now on. Collective."""
    _choose_interface(world.place)
    scheme, store = f"board-{world.attempt}", world.board.rpc_store()
    found = (store, world.rank, world.size)
    dist.register_rendezvous_handler(scheme, lambda url: iter([found]))  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{scheme}://", rpc_timeout=LAST_RESORT_S)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of its older interface
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=options
        )


def name(rank: int) -> str:
    """What its agent is called."""
    return f"rank{rank}"


def answer(future: Future[Any], *, rank: int) -> Any:
    """What `rank` answers to a call. Raises RankLost if it is gone, and what the call raised there."""
    return attempt(future.wait, rank=rank)


def attempt(ask: Callable[[], Any], *, rank: int) -> Any:
    """What `ask` gives, which needs `rank` to be there. Raises RankLost if it is gone."""
    try:
        return ask()
    except RuntimeError as error:
        if "tensorpipe" not in str(error):
            raise
        raise gone(rank) from error


def gone(rank: int) -> RankLost:
    """What to raise when `rank` has left without a word."""
    return RankLost(f"rank {rank} has closed its connection: it was killed, or its own log says why it ended", rank=rank)


def watch(rank: int, on_lost: Callable[[int], object]) -> None:
    """Call `on_lost(rank)`, in a thread of the agent's, when `rank` is gone without having left in good order.

    A connection that breaks fails the calls that wait on it, and nobody else hears of it: so one call always waits.
    """

    def ended(call: Future[None]) -> None:
        try:
            call.value()
        except RuntimeError:
            on_lost(rank)

    rpc.rpc_async(name(rank), _until_left, timeout=0).add_done_callback(ended)


def close() -> None:
    """Leave in good order; nobody may call any more. Collective."""
    _left.set_result(None)
    rpc.shutdown(timeout=CLOSE_S)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _until_left() -> Future[None]:
    return _left


def _choose_interface(place: Place) -> None:
    """TensorPipe takes the address that the host's own name resolves to, as gloo does, unless it is told."""
    has_loopback = any(name == "lo" for _, name in socket.if_nameindex())
    loopback = "lo" if place.is_one_node and has_loopback else None
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", loopback):
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
