"""Check, then time, over message sizes and world sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.collectives.collective import Collective, collectives
from train.collectives.link import Link
from train.collectives.model import Network, fit
from train.collectives.wire import written_bytes
from train.errors import MusterError

ENOUGH_BYTES = 256 * 1024  # what one turn moves at least: ranks leave a barrier as far apart as a message takes
MOST_CALLS = 50


@dataclass(frozen=True)
class Measured:
    """One collective at one size. seconds: a call on its slowest rank, the median over turns."""

    name: str
    world_size: int
    nbytes: int
    seconds: float
    model_seconds: float | None
    """None for the backend's own, which keeps its algorithm to itself."""
    sent_bytes: list[int] | None
    """By rank, counted in one call; of the backend's own by the kernel, headers and all, or None where it cannot."""


@dataclass(frozen=True)
class Figures:
    """All that one run has measured. ping_pong: (bytes, seconds one way) of a message between ranks 0 and 1."""

    backend: str
    device: str
    torch: str
    network: Network
    ping_pong: list[tuple[int, float]]
    measured: list[Measured]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """Measures the first W ranks of the process group, W by W; the others wait. All methods are collective.

    Args:
        rounds: turns that each collective gets, of which the median counts.
    """

    def __init__(self, device: torch.device, *, backend: str, rounds: int):
        self.device, self.backend, self.rounds = device, backend, rounds
        self.collectives = collectives(backend)
        self.counts_own = device.type == "cpu" and written_bytes() is not None

    def measure(self, *, world_sizes: Sequence[int], sizes: Sequence[int]) -> Figures:
        """Figures of messages of `sizes` bytes. Raises MusterError if a collective's result is wrong."""
        links = {world_size: self.link(world_size) for world_size in sorted({2, *world_sizes})}
        ping_pong = self.ping_pong(links[2], sizes)
        network = fit(*zip(*ping_pong, strict=True))
        measured = [
            each
            for world_size in world_sizes
            for nbytes in sizes
            for each in self.compare(links[world_size], world_size, nbytes, network)
        ]
        return Figures(self.backend, self.device.type, torch.__version__, network, ping_pong, measured)

    def link(self, world_size: int) -> Link | None:
        """Connections among the first `world_size` ranks; None on the others."""
        group = dist.new_group(list(range(world_size)))
        return Link(group) if isinstance(group, dist.ProcessGroup) else None

    def ping_pong(self, link: Link | None, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """For each of `sizes` the seconds that a message takes from rank 0 to rank 1, which sends it back."""
        calls = [(partial(there_and_back, torch.zeros(nbytes // 4, device=self.device)), nbytes) for nbytes in sizes]
        return [(nbytes, seconds / 2) for nbytes, seconds in zip(sizes, self._medians(calls, link), strict=True)]

    def compare(self, link: Link | None, world_size: int, nbytes: int, network: Network) -> list[Measured]:
        """All collectives at one size, by turns, so that what else the machine does falls on each of them alike."""
        self._check(link, world_size, nbytes)
        tensor = torch.zeros(nbytes // 4, device=self.device)
        calls = [partial(each.call, tensor) for each in self.collectives]
        seconds, sent = self._medians([(call, nbytes) for call in calls], link), self._sent(tensor, link)
        return [
            Measured(
                each.name, world_size, nbytes, seconds[at],
                model_seconds=network.seconds(each.algorithm.cost(world_size, nbytes)) if each.algorithm else None,
                sent_bytes=sent[at][:world_size] if each.algorithm or self.counts_own else None,
            )
            for at, each in enumerate(self.collectives)
        ]  # fmt: skip

    def _check(self, link: Link | None, world_size: int, nbytes: int) -> None:
        wrong = torch.zeros(len(self.collectives))
        if link:
            for at, each in enumerate(self.collectives):
                wrong[at] = not each.is_exact(link, nbytes // 4, self.device)
        dist.all_reduce(wrong)
        if names := [each.name for each, ranks in zip(self.collectives, wrong.tolist(), strict=True) if ranks]:
            raise MusterError(
                f"{' and '.join(names)} gave a wrong result over {world_size} ranks and {nbytes} bytes: do not trust this "
                f"{self.backend} and network with training"
            )

    def _sent(self, tensor: Tensor, link: Link | None) -> list[list[int]]:
        sent = torch.zeros(len(self.collectives), dist.get_world_size(), dtype=torch.int64)
        if link:
            for at, each in enumerate(self.collectives):
                before = _sent_until_now(each, link)
                each.call(tensor, link)
                sent[at, link.rank] = _sent_until_now(each, link) - before
        dist.all_reduce(sent)
        return sent.tolist()

    def _medians(self, calls: Sequence[tuple[Callable[[Link], Any], int]], link: Link | None) -> list[float]:
        turns = torch.zeros(self.rounds, len(calls), dtype=torch.float64)
        if link:
            for turn, (at, (call, nbytes)) in product(range(self.rounds), enumerate(calls)):
                turns[turn, at] = self._seconds(call, link, nbytes)
        dist.all_reduce(turns, dist.ReduceOp.MAX)
        return turns.median(dim=0).values.tolist()

    def _seconds(self, call: Callable[[Link], Any], link: Link, nbytes: int) -> float:
        times = min(MOST_CALLS, max(1, ENOUGH_BYTES // nbytes))
        dist.all_reduce(torch.zeros(1), group=link.group)
        began = time.perf_counter()
        for _ in range(times):
            call(link)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - began) / times


def _sent_until_now(collective: Collective, link: Link) -> int:
    return link.sent_bytes if collective.algorithm else written_bytes() or 0


def there_and_back(tensor: Tensor, link: Link) -> None:
    """Rank 0 sends `tensor` to rank 1, which sends it back. Collective."""
    for sender in (0, 1):
        if link.rank == sender:
            link.send(tensor, to=1 - sender)
        else:
            link.receive(tensor, source=sender)
