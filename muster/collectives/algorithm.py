"""Interface of all-reduce algorithms, for checking, timing and plotting them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from muster.collectives.link import Link


@dataclass(frozen=True)
class Cost:
    """Theoretical cost of one all-reduce, independent of the network.

    messages: number of sequential rounds, each of which waits for a message.
    nbytes: bytes sent sequentially on the longest path.
    busiest_bytes: bytes sent by the rank that sends most.
    """

    messages: int
    nbytes: float
    busiest_bytes: float


class Algorithm(ABC):
    """An all-reduce algorithm. Each sends 2 (W - 1) n bytes in total; they differ in which rank sends when."""

    name: str

    @abstractmethod
    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        """Replace the contiguous `tensor`, [n], by its sum over the ranks of `link`. Collective for these ranks."""

    @abstractmethod
    def cost(self, world_size: int, nbytes: float) -> Cost:
        """Return the cost for a tensor of `nbytes`, if every rank can send and receive at the same time."""


def rounds_of_doubling(world_size: int) -> int:
    """Return the number of doublings from one rank to `world_size` ranks: log2, rounded up."""
    return (world_size - 1).bit_length()
