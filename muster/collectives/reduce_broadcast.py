"""Reduce to rank 0, then broadcast: the simplest all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.collectives.algorithm import Algorithm, Cost
from muster.collectives.link import Link


class ReduceBroadcast(Algorithm):
    """Rank 0 receives every rank's tensor in turn, adds it, and sends the sum to every rank in turn."""

    name = "reduce, broadcast"

    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        if link.rank:
            link.send(tensor, to=0)
            link.receive(tensor, source=0)
            return
        inbox = torch.empty_like(tensor)
        for peer in range(1, link.size):
            link.receive(inbox, source=peer)
            tensor += inbox
        for peer in range(1, link.size):
            link.send(tensor, to=peer)

    def cost(self, world_size: int, nbytes: float) -> Cost:
        others = world_size - 1
        return Cost(messages=2 * others, nbytes=2 * others * nbytes, busiest_bytes=others * nbytes)
