"""Check that all expected ranks are present, and that all belong to one Slurm job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, by_value
from muster.world.environment import asked_for
from muster.world.group import World


class Ranks(Check):
    name = "ranks"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        return {
            "world_size": world.size,
            "meant": asked_for(world.environment.local_world_size),
            "slurm": os.environ.get("SLURM_JOB_ID", ""),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        first = ranks[0]
        expected = visit.expected or first["meant"]
        found: list[Finding] = []
        if expected and len(ranks) != expected:
            hosts = ", ".join(dict.fromkeys(facts["host"] for facts in ranks))
            remedy = (
                "look at the log of the nodes that are missing: is the rendezvous port open to them, and did they meet "
                "somewhere else, because the endpoint's name is not one host?"
            )
            found.append(Finding(f"{len(ranks)} of {expected} ranks are here, on {hosts}", remedy))
        if len(jobs := [job for job in by_value(ranks, "slurm") if job]) > 1:
            found.append(
                Finding(
                    f"ranks of {len(jobs)} Slurm jobs have met: {', '.join(jobs)}", "give each job a port of its own"
                )
            )
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        hosts = sorted({facts["host"] for facts in ranks})
        return f"{len(ranks)} on {len(hosts)} host{'s' * (len(hosts) > 1)}: {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"
