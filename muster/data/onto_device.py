"""Copy micro-batches to the GPU on a stream of their own, one step ahead of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

Item = TypeVar("Item")


def onto(
    device: torch.device,
    steps: Iterable[Item],
    move: Callable[[Item], Item],
    *,
    tensors: Callable[[Item], Any],
    ahead: bool,
) -> Iterator[Item]:
    """Yield each item of `steps` after its tensors have been copied from pinned memory to `device`, a GPU.

    The copies run beside the kernels of the step before; the stream of the caller waits for them, its thread does not.
    `move` returns an item whose tensors are on the device, and what it computes there runs beside the step, too. `tensors`
    returns an item's tensors, alone or nested in containers. `ahead`: as `one_ahead`.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams (record_stream)
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(item: Item) -> tuple[Item, Any]:
        with torch.cuda.stream(stream):
            return move(item), stream.record_event()

    moved = map(copied, steps)
    for item, copy in one_ahead(moved) if ahead else moved:
        current = torch.cuda.current_stream(device)
        current.wait_event(copy)
        for leaf in pytree.tree_leaves(tensors(item)):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(current)  # its memory is not used again before the step has read it
        yield item


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items; each is made before the one before it is yielded. An error is raised in its item's turn."""
    failure: Exception | None = None
    last = next(items, None)
    while last is not None:
        following = None
        try:
            following = next(items, None)
        except Exception as error:
            failure = error
        yield last
        if failure:
            raise failure
        last = following
