"""Check that no link between two ranks is slower than the median link divided by `SLOWER`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.doctor.base import Check, Facts, Finding, Visit, outliers
from muster.world.group import World

SIZE = 1 << 20
ROUNDS = 5
SLOWER = 4.0
MOST_RANKS = 32
"""With more ranks than this, only the first rank of each host is measured, and at most this many."""


class Links(Check):
    name = "links"
    slow = True

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        chosen = [
            rank
            for rank in range(world.size)
            if world.size <= MOST_RANKS or rank % world.environment.local_world_size == 0
        ]
        chosen = chosen[:MOST_RANKS]
        found: dict[str, list[float]] = {}
        for distance in range(1, len(chosen)):  # in each round every rank is in at most two pairs
            for first, second in pairs(len(chosen), distance):
                a, b = chosen[first], chosen[second]
                if world.rank in (a, b):
                    measured = talk(world, b if world.rank == a else a, begins=world.rank == a)
                    if world.rank == a:
                        found[f"{a}-{b}"] = measured
        return {"links": found}

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        links = {name: value for facts in ranks for name, value in facts["links"].items()}
        speeds = {name: speed for name, (_, speed) in links.items()}
        found = []
        for name in outliers(speeds, factor=SLOWER):
            a, b = (int(rank) for rank in name.split("-"))
            usual = sorted(speeds.values())[len(speeds) // 2]
            said = f"ranks {a} on {ranks[a]['host']} and {b} on {ranks[b]['host']} talk at {speeds[name]:.0f} MB/s, most at {usual:.0f}"
            found.append(Finding(said, "look at that node's interface, cable and switch port", fails=False))
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        values = [value for facts in ranks for value in facts["links"].values()]
        if not values:
            return "one rank"
        latency, speed = (sorted(column)[len(values) // 2] for column in zip(*values, strict=True))
        return f"median {latency * 1e6:.0f} us, {speed:.0f} MB/s"


def pairs(number: int, distance: int) -> list[tuple[int, int]]:
    """Return the pairs of numbers below `number` whose difference is `distance`."""
    return [(first, first + distance) for first in range(number - distance)]


def talk(world: World, other: int, *, begins: bool) -> list[float]:
    """Measure a link: return [one-way seconds of one byte, MB/s of one MiB]. Both ranks of the link must call it."""
    medians = []
    for size in (1, SIZE):
        buffer, times = torch.zeros(size, dtype=torch.uint8, device=world.device), []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for sends in (begins, not begins):
                dist.send(buffer, other) if sends else dist.recv(buffer, other)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append((time.perf_counter() - began) / 2)
        medians.append(sorted(times)[ROUNDS // 2])
    return [medians[0], SIZE / medians[1] / 1e6]
