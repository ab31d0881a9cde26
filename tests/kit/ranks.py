"""Run a function on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kit import warm
from kit.job import by_hand


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, lost: Iterable[int] = ()) -> list[Any]:
    """Call `function(*args)` in `ranks` new processes with RANK etc. set; return one value per rank, except those `lost`."""
    queue = warm.context.Queue()
    processes = [warm.start(_on_rank, queue, function, args, rank, place) for rank, place in enumerate(by_hand(ranks))]
    kept = [rank for rank in range(ranks) if rank not in lost]
    values = dict(queue.get(timeout=300) for _ in kept)
    for process in processes:
        process.join(timeout=30)
    failures = [text for text in (values[rank][1] for rank in kept) if text]
    assert not failures, "\n".join(failures)
    return [values[rank][0] for rank in kept]


def _on_rank(queue: Any, function: Callable[..., Any], args: tuple[Any, ...], rank: int, place: dict[str, str]) -> None:
    import traceback

    os.environ.update(place)
    torch.set_num_threads(1)
    try:
        queue.put((rank, (function(*args), None)))
    except BaseException:
        queue.put((rank, (None, f"rank {rank}:\n{traceback.format_exc()}")))
