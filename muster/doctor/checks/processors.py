"""Check that a host's ranks start no more threads than it has usable processors, and that Slurm's request is met."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from muster.doctor.base import Check, Facts, Finding, Visit
from muster.process import usable_processors
from muster.world.group import World


class Processors(Check):
    name = "processors"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        return {
            "usable": usable_processors(),
            "quota": quota(),
            "threads": torch.get_num_threads(),
            "local_world_size": world.environment.local_world_size,
            "asked": int(os.environ.get("SLURM_CPUS_PER_TASK", "0")),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found: list[Finding] = []
        for host in dict.fromkeys(facts["host"] for facts in ranks):
            here = [facts for facts in ranks if facts["host"] == host]
            usable = {number for facts in here for number in facts["usable"]}
            limit = min([len(usable), *(facts["quota"] for facts in here if facts["quota"])])
            threads = sum(facts["threads"] for facts in here)
            if threads > limit:
                found.append(
                    Finding(
                        f"{host}: {len(here)} ranks start {threads} threads on {limit:g} processors",
                        f"set OMP_NUM_THREADS={max(1, int(limit) // len(here))}, or start fewer ranks",
                        fails=False,
                    )
                )
            if here[0]["asked"] > len(usable):
                found.append(
                    Finding(
                        f"{host}: Slurm was asked for {here[0]['asked']} processors per task, but only {len(usable)} can be used",
                        "srun does not inherit --cpus-per-task: pass it to srun as well, or set SRUN_CPUS_PER_TASK",
                    )
                )
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        counts = sorted({len(facts["usable"]) for facts in ranks})
        threads = sorted({facts["threads"] for facts in ranks})
        return f"{'/'.join(map(str, counts))} usable, {'/'.join(map(str, threads))} threads a rank"


def quota() -> float | None:
    """Return the number of processors that the cgroup allows (cpu.max in cgroup v2); None if it sets no limit."""
    try:
        most, _, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").partition(" ")
    except OSError:
        return None
    return None if most == "max" else int(most) / int(period)
