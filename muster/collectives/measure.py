"""Checks and timings of collectives over message sizes and world sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.collectives.algorithm import Network, fit
from muster.collectives.collective import Collective, collectives
from muster.collectives.link import Link, written_bytes
from muster.errors import MusterError
from muster.process import usable_processors
from muster.timing.timing_file import processor

ENOUGH_BYTES = 256 * 1024  # minimum per turn: ranks leave a barrier up to a message's time apart
MOST_CALLS = 50


@dataclass(frozen=True)
class Measured:
    """Measurement of one collective at one size. seconds: time of a call on its slowest rank, median over turns."""

    name: str
    world_size: int
    nbytes: int
    seconds: float
    model_seconds: float | None
    """Seconds by the alpha-beta model; None for the backend's own collectives, whose algorithm is unknown."""
    sent_bytes: list[int] | None
    """Bytes sent by each rank in one call; for the backend's own collectives the kernel's count, headers included, or
    None if it has none."""


@dataclass(frozen=True)
class Figures:
    """All measurements of one run.

    setting: rank 0's hardware, torch, load and date. ping_pong: (bytes, one-way seconds) between ranks 0 and 1.
    """

    backend: str
    device: str
    torch: str
    setting: str
    network: Network
    ping_pong: list[tuple[int, float]]
    measured: list[Measured]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def setting(device: torch.device) -> str:
    processors = f"{len(usable_processors())} processors ({processor()})"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processors
    load = f"load average {os.getloadavg()[0]:.0f}"
    return f"{hardware}, torch {torch.__version__}, {load}, {time.strftime('%Y-%m-%d')}"


class Bench:
    """Measures collectives on the first W ranks of the process group, for each W; the other ranks wait.

    All methods are collective: every rank must call them. `rounds`: timings of each collective, of which the median is taken.
    """

    def __init__(self, device: torch.device, *, backend: str, rounds: int):
        self.device, self.backend, self.rounds = device, backend, rounds
        self.collectives = collectives(backend)
        self.counts_own = device.type == "cpu" and written_bytes() is not None

    def measure(self, *, world_sizes: Sequence[int], sizes: Sequence[int]) -> Figures:
        """Measure all collectives with messages of `sizes` bytes. Raises MusterError if a result is wrong."""
        links = {world_size: self.link(world_size) for world_size in sorted({2, *world_sizes})}
        ping_pong = self.ping_pong(links[2], sizes)
        network = fit(*zip(*ping_pong, strict=True))
        measured = [
            each
            for world_size in world_sizes
            for nbytes in sizes
            for each in self.compare(links[world_size], world_size, nbytes, network)
        ]
        return Figures(
            self.backend, self.device.type, torch.__version__, setting(self.device), network, ping_pong, measured
        )

    def link(self, world_size: int) -> Link | None:
        """Return the link among the first `world_size` ranks; None on the other ranks."""
        group = dist.new_group(list(range(world_size)))
        return Link(group) if isinstance(group, dist.ProcessGroup) else None

    def ping_pong(self, link: Link | None, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Return (bytes, one-way seconds) for each of `sizes`, from messages that rank 1 returns to rank 0."""
        calls = [(partial(there_and_back, torch.zeros(nbytes // 4, device=self.device)), nbytes) for nbytes in sizes]
        return [(nbytes, seconds / 2) for nbytes, seconds in zip(sizes, self._medians(calls, link), strict=True)]

    def compare(self, link: Link | None, world_size: int, nbytes: int, network: Network) -> list[Measured]:
        """Measure all collectives at one size, in turns, so that other load on the machine affects all equally."""
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
    """Send `tensor` from rank 0 to rank 1 and back. Collective for these two ranks; other ranks must not call it."""
    for sender in (0, 1):
        if link.rank == sender:
            link.send(tensor, to=1 - sender)
        else:
            link.receive(tensor, source=sender)
