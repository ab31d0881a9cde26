"""The measured collectives: each algorithm and the backend's own, as one call with a known result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muster.collectives.algorithm import Algorithm
from muster.collectives.halving_doubling import HalvingDoubling
from muster.collectives.link import Link
from muster.collectives.reduce_broadcast import ReduceBroadcast
from muster.collectives.ring import Ring
from muster.collectives.tree import Tree

ALGORITHMS: tuple[Algorithm, ...] = (ReduceBroadcast(), Tree(), Ring(), HalvingDoubling())
PATTERN, WEIGHTS = 7, 8  # float32 sums of small integers are exact in any order


@dataclass(frozen=True)
class Collective:
    """A collective to measure.

    call: runs it on a tensor, [n]. expected: maps a pattern x and a world size to the correct result, where rank r has
    weight(r) x. algorithm: None for the backend's own collectives.
    """

    name: str
    call: Callable[[Tensor, Link], Tensor]
    expected: Callable[[Tensor, int], Tensor]
    algorithm: Algorithm | None = None

    def is_exact(self, link: Link, count: int, device: torch.device) -> bool:
        """Return True if the result for `count` float32 values is correct. Collective."""
        pattern = (torch.arange(count, device=device) % PATTERN).float()
        return torch.equal(self.call(pattern * weight(link.rank), link), self.expected(pattern, link.size))


def weight(rank: int) -> int:
    """Return the factor of a rank's values, which differs from its neighbors'."""
    return rank % WEIGHTS + 1


def collectives(backend: str) -> list[Collective]:
    """Return all compared collectives: the algorithms, then the backend's own, whose names begin with `backend`."""
    own = (
        ("all_reduce", _all_reduce, sum_of),
        ("all_gather", _all_gather, all_of),
        ("broadcast", _broadcast, first_of),
    )
    return [
        *(Collective(each.name, _in_place(each), sum_of, each) for each in ALGORITHMS),
        *(Collective(f"{backend} {name}", call, expected) for name, call, expected in own),
    ]


def sum_of(pattern: Tensor, world_size: int) -> Tensor:
    return pattern * sum(map(weight, range(world_size)))


def all_of(pattern: Tensor, world_size: int) -> Tensor:
    """Return all ranks' values, [W, n]."""
    return torch.stack([pattern * weight(rank) for rank in range(world_size)])


def first_of(pattern: Tensor, world_size: int) -> Tensor:
    return pattern * weight(0)


def _in_place(algorithm: Algorithm) -> Callable[[Tensor, Link], Tensor]:
    def call(tensor: Tensor, link: Link) -> Tensor:
        algorithm.all_reduce(tensor, link)
        return tensor

    return call


def _all_reduce(tensor: Tensor, link: Link) -> Tensor:
    dist.all_reduce(tensor, group=link.group)
    return tensor


def _all_gather(tensor: Tensor, link: Link) -> Tensor:
    gathered = tensor.new_empty(link.size, len(tensor))
    dist.all_gather(list(gathered.unbind()), tensor, group=link.group)
    return gathered


def _broadcast(tensor: Tensor, link: Link) -> Tensor:
    dist.broadcast(tensor, group=link.group, group_src=0)
    return tensor
