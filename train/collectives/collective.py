"""What is measured: each algorithm and the backend's own collectives, as one call with a result that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from train.collectives.algorithm import Algorithm
from train.collectives.halving_doubling import HalvingDoubling
from train.collectives.link import Link
from train.collectives.reduce_broadcast import ReduceBroadcast
from train.collectives.ring import Ring
from train.collectives.tree import Tree

ALGORITHMS: tuple[Algorithm, ...] = (ReduceBroadcast(), Tree(), Ring(), HalvingDoubling())
PATTERN, WEIGHTS = 7, 8  # with small whole numbers a sum in float32 is exact, in whatever order it is made


@dataclass(frozen=True)
class Collective:
    """call: carries it out on a tensor, [n]. expected: of a world size, what it must give where rank r has weight(r) x."""

    name: str
    call: Callable[[Tensor, Link], Tensor]
    expected: Callable[[Tensor, int], Tensor]
    algorithm: Algorithm | None = None

    def is_exact(self, link: Link, count: int, device: torch.device) -> bool:
        """Whether `count` float32 values come out as they must. Collective."""
        pattern = (torch.arange(count, device=device) % PATTERN).float()
        return torch.equal(self.call(pattern * weight(link.rank), link), self.expected(pattern, link.size))


def weight(rank: int) -> int:
    """What tells a rank's values from its neighbours'."""
    return rank % WEIGHTS + 1


def collectives(backend: str) -> list[Collective]:
    """All that are compared, the algorithms first; the rest bear the backend's name."""
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
    """[n], all ranks' values added."""
    return pattern * sum(map(weight, range(world_size)))


def all_of(pattern: Tensor, world_size: int) -> Tensor:
    """[W, n], all ranks' values."""
    return torch.stack([pattern * weight(rank) for rank in range(world_size)])


def first_of(pattern: Tensor, world_size: int) -> Tensor:
    """[n], rank 0's values."""
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
