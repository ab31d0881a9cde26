"""Recursive halving and doubling: the bytes of a ring in the rounds of a tree."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from muster.collectives.algorithm import Algorithm, Cost
from muster.collectives.link import Link


class HalvingDoubling(Algorithm):
    """A reduce-scatter in which pairs of ranks exchange halves of their current part, then an all-gather in reverse.

    It needs a power of two of ranks: each surplus rank first adds its tensor to a neighbor's, and receives the sum at the end.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """

    name = "halving-doubling"

    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        surplus = link.size - core_of(link.size)
        if link.rank >= 2 * surplus:
            self._core(tensor, link, surplus=surplus)
        elif link.rank % 2 == 0:
            link.send(tensor, to=link.rank + 1)
            link.receive(tensor, source=link.rank + 1)
        else:
            inbox = torch.empty_like(tensor)
            link.receive(inbox, source=link.rank - 1)
            tensor += inbox
            self._core(tensor, link, surplus=surplus)
            link.send(tensor, to=link.rank - 1)

    def _core(self, tensor: Tensor, link: Link, *, surplus: int) -> None:
        index = link.rank // 2 if link.rank < 2 * surplus else link.rank - surplus
        inbox = torch.empty_like(tensor)
        rounds = halvings(tensor.numel(), index=index, core=core_of(link.size))
        for peer, kept, given in rounds:
            to = peer * 2 + 1 if peer < surplus else peer + surplus
            arrived = inbox[: kept.stop - kept.start]
            link.exchange(tensor[given], to=to, received=arrived, source=to)
            tensor[kept] += arrived
        for peer, kept, given in reversed(rounds):
            to = peer * 2 + 1 if peer < surplus else peer + surplus
            link.exchange(tensor[kept], to=to, received=tensor[given], source=to)

    def cost(self, world_size: int, nbytes: float) -> Cost:
        core = core_of(world_size)
        rounds, sent = 2 * (core.bit_length() - 1), 2 * (core - 1) / core * nbytes
        if core == world_size:
            return Cost(messages=rounds, nbytes=sent, busiest_bytes=sent)
        return Cost(messages=rounds + 2, nbytes=sent + 2 * nbytes, busiest_bytes=sent + nbytes)


def core_of(world_size: int) -> int:
    """Return the largest power of two up to `world_size`."""
    return 1 << (world_size.bit_length() - 1)


def halvings(length: int, *, index: int, core: int) -> list[tuple[int, slice, slice]]:
    """Return for each round the peer's index, and the slices of a tensor of `length` that `index` keeps and sends."""
    share, longer = divmod(length, core)
    edges = [0, *accumulate(share + (chunk < longer) for chunk in range(core))]
    low, high, rounds = 0, core, []
    while high - low > 1:
        middle, distance = (low + high) // 2, (high - low) // 2
        lower, upper = slice(edges[low], edges[middle]), slice(edges[middle], edges[high])
        if index < middle:
            rounds.append((index + distance, lower, upper))
            high = middle
        else:
            rounds.append((index - distance, upper, lower))
            low = middle
    return rounds
