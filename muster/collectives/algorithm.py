"""Interface of all-reduce algorithms, for checking, timing and plotting them, and the model of their cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class Network:
    """The alpha-beta model: a message of n bytes takes alpha + beta n seconds, for any two ranks and any other traffic.

    alpha_s: seconds per message. beta_s: seconds per byte.

    Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 1994.
    """

    alpha_s: float
    beta_s: float

    def seconds(self, cost: Cost) -> float:
        """Return the predicted seconds of one all-reduce; the time of the additions is ignored."""
        return cost.messages * self.alpha_s + cost.nbytes * self.beta_s


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> Network:
    """Fit alpha and beta, both at least 0, to the measured `seconds` of messages of `nbytes`, by least squares.

    Errors are relative to the measured times: with absolute errors the largest messages alone would determine the fit,
    and alpha would be arbitrary, as it is lost in their noise.
    """
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return Network(float(alpha), float(beta))
    column = terms[:, 1] if alpha < 0 else terms[:, 0]
    only = float(column.sum() / (column @ column))
    return Network(0.0, only) if alpha < 0 else Network(only, 0.0)
