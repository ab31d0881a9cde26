"""The seam between an all-reduce algorithm and what checks, times and draws it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from train.collectives.link import Link


@dataclass(frozen=True)
class Cost:
    """What one all-reduce costs by theory, whatever the network.

    messages: rounds that have to follow one another, each of which waits for a message.
    nbytes: bytes that have to follow one another on the longest path.
    busiest_bytes: bytes that the rank that sends most sends.
    """

    messages: int
    nbytes: float
    busiest_bytes: float


class Algorithm(ABC):
    """One way to sum a tensor over ranks. All of them send 2 (W - 1) n bytes in all; they differ in who sends when."""

    name: str

    @abstractmethod
    def all_reduce(self, tensor: Tensor, link: Link) -> None:
        """Replace the contiguous `tensor`, [n], by its sum over the ranks of `link`. Collective."""

    @abstractmethod
    def cost(self, world_size: int, nbytes: float) -> Cost:
        """Of a tensor of `nbytes`, where every rank can send and receive at the same time."""


def rounds_of_doubling(world_size: int) -> int:
    """How often one has to double to get from one rank to all: log2, rounded up."""
    return (world_size - 1).bit_length()
