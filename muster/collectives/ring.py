"""Ring all-reduce: every rank sends only to the next rank, one chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.collectives.algorithm import Algorithm, Cost
from muster.collectives.link import Link


class Ring(Algorithm):
    """A reduce-scatter, after which each rank holds one chunk's sum, then an all-gather of the chunks.

    Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.
    """

    name = "ring"

    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        chunks = tensor.tensor_split(link.size)
        inbox = torch.empty_like(chunks[0])  # the first chunk is the longest
        following, preceding = (link.rank + 1) % link.size, (link.rank - 1) % link.size
        for step in range(link.size - 1):
            done, next_ = chunks[(link.rank - step) % link.size], chunks[(link.rank - step - 1) % link.size]
            arrived = inbox[: next_.numel()]
            link.exchange(done, to=following, received=arrived, source=preceding)
            next_ += arrived
        for step in range(link.size - 1):
            done, next_ = chunks[(link.rank + 1 - step) % link.size], chunks[(link.rank - step) % link.size]
            link.exchange(done, to=following, received=next_, source=preceding)

    def cost(self, world_size: int, nbytes: float) -> Cost:
        rounds = 2 * (world_size - 1)
        sent = rounds * nbytes / world_size
        return Cost(messages=rounds, nbytes=sent, busiest_bytes=sent)
