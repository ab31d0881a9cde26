"""A function on several ranks, one value from each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.multiprocessing as mp

from kit.job import free_port


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, lost: Iterable[int] = ()) -> list[Any]:
    """Call `function(*args)` in `ranks` fresh processes that find RANK and its kin set; one value a rank, less the `lost`."""
    context = mp.get_context("spawn")
    port, queue = free_port(), context.Queue()
    processes = [
        context.Process(target=_on_rank, args=(queue, function, args, rank, ranks, port)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    kept = [rank for rank in range(ranks) if rank not in lost]
    values = dict(queue.get(timeout=120) for _ in kept)
    for process in processes:
        process.join(timeout=30)
    failures = [text for text in (values[rank][1] for rank in kept) if text]
    assert not failures, "\n".join(failures)
    return [values[rank][0] for rank in kept]


def _on_rank(queue: Any, function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, port: int) -> None:
    import traceback

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        queue.put((rank, (function(*args), None)))
    except BaseException:
        queue.put((rank, (None, f"rank {rank}:\n{traceback.format_exc()}")))
