"""Check of compute speed, on all ranks at once, and of all-reduce.

No rank may multiply matrices slower than the median rank divided by `SLOWER`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.doctor.base import Check, Facts, Finding, Visit, outliers
from muster.world.group import World

SIDE = {"cpu": 512, "cuda": 4096}
ROUNDS = 10
SLOWER = 1.5
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Sizes of the all-reduces in bytes."""


class Speed(Check):
    name = "speed"
    slow = True

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        matrix = torch.rand(SIDE[world.device.type], SIDE[world.device.type], device=world.device)
        seconds = timed(world, lambda: torch.mm(matrix, matrix))
        sums = {}
        for size in SIZES if world.size > 1 else ():
            tensor = torch.zeros(size // 4, device=world.device)
            took = timed(world, lambda tensor=tensor: dist.all_reduce(tensor))
            sums[str(size)] = 2 * (world.size - 1) / world.size * size / took / 1e6
        return {"gflops": 2 * matrix.shape[0] ** 3 / seconds / 1e9, "sums": sums}

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        rates = {str(facts["rank"]): facts["gflops"] for facts in ranks}
        usual = sorted(rates.values())[len(rates) // 2]
        return [
            Finding(
                f"rank {rank} on {ranks[int(rank)]['host']} multiplies at {rates[rank]:.0f} GFLOP/s, most at {usual:.0f}",
                "look for other jobs, throttling or a smaller quota there: all ranks wait for the slowest",
                fails=False,
            )
            for rank in outliers(rates, factor=SLOWER)
        ]

    def summary(self, ranks: Sequence[Facts]) -> str:
        rates = sorted(facts["gflops"] for facts in ranks)
        sums = ranks[0]["sums"]
        bus = f", all-reduce of {SIZES[-1] >> 20} MiB at {sums[str(SIZES[-1])]:.0f} MB/s (bus)" if sums else ""
        return f"{rates[0]:.0f} to {rates[-1]:.0f} GFLOP/s a rank{bus}"


def timed(world: World, act: Any) -> float:
    """Return the median seconds of `act` over `ROUNDS` rounds, after one warm-up call."""
    times = []
    act()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - began)
    return sorted(times)[ROUNDS // 2]
