"""A visit of the doctor: all checks run on all ranks, and rank 0 judges their facts."""

from __future__ import annotations

import importlib
import pkgutil
import time
from dataclasses import asdict
from typing import Any

from muster.dist.world import World
from muster.doctor import checks
from muster.doctor.base import Check, Finding, Visit, whereabouts
from muster.origin import located
from muster.redact import redacted_all


def all_checks() -> list[Check]:
    """Return an instance of each class in checks/, quick ones first."""
    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    found = [kind() for kind in Check.__subclasses__() if kind.__module__.startswith(f"{checks.__name__}.")]
    return sorted(found, key=lambda check: (check.slow, check.name != "ranks", check.name))


def examine(world: World, visit: Visit) -> list[dict[str, Any]]:
    """Return for each check its name, summary, seconds, findings and the ranks' facts; empty except on rank 0.

    Collective: every rank must call it.
    """
    results = []
    for check in all_checks():
        if check.slow and visit.quick:
            continue
        began, facts = time.perf_counter(), dict[str, Any]()
        try:
            facts = check.look(world, visit)
        except (OSError, ValueError, KeyError) as error:  # a machine may lack a file or tool that others have
            facts = {"cannot": located(error)}
        ranks = world.gather({**whereabouts(world), **facts})
        if not world.is_first:
            continue
        seconds = time.perf_counter() - began
        blind = [each for each in ranks if "cannot" in each]
        if blind:
            said = f"rank {blind[0]['rank']} on {blind[0]['host']} could not look: {blind[0]['cannot']}"
            summary, findings = "", [Finding(said, "check that this node is set up like the others", fails=False)]
        else:
            summary, findings = check.summary(ranks), check.judge(ranks, visit)
        results.append(
            {
                "check": check.name,
                "seen": summary,
                "seconds": round(seconds, 2),
                "findings": [asdict(finding) for finding in findings],
                "ranks": ranks,
            }
        )
    return list(redacted_all(results))
