"""Binomial tree all-reduce: in each round half of the remaining ranks send to the other half."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.collectives.algorithm import Algorithm, Cost, rounds_of_doubling
from muster.collectives.link import Link


class Tree(Algorithm):
    """A reduction of whole tensors up a binomial tree to rank 0, then a broadcast down the same tree.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """

    name = "tree"

    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        parent, children = family(link.rank, link.size)
        inbox = torch.empty_like(tensor) if children else tensor
        for child in children:
            link.receive(inbox, source=child)
            tensor += inbox
        if parent is not None:
            link.send(tensor, to=parent)
            link.receive(tensor, source=parent)
        for child in reversed(children):  # the one with the largest subtree first
            link.send(tensor, to=child)

    def cost(self, world_size: int, nbytes: float) -> Cost:
        rounds = rounds_of_doubling(world_size)
        return Cost(messages=2 * rounds, nbytes=2 * rounds * nbytes, busiest_bytes=rounds * nbytes)


def family(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    """Return the rank's parent (None for rank 0) and its children, the one with the smallest subtree first."""
    lowest_bit = rank & -rank or 1 << rounds_of_doubling(world_size)
    steps = (1 << bit for bit in range(lowest_bit.bit_length() - 1))
    return (rank - lowest_bit if rank else None), [rank + step for step in steps if rank + step < world_size]
