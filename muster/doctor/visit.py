"""A visit of the doctor: all checks run on all ranks, and rank 0 judges their facts."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError

from muster.code_location import located
from muster.doctor import checks
from muster.doctor.base import Check, Facts, Finding, Visit, whereabouts
from muster.errors import MusterError
from muster.redact import redacted_all
from muster.world.group import World

CANNOT = "cannot"
"""Name of the fact that says why a rank could not look."""


def all_checks() -> list[Check]:
    """Return an instance of each class in checks/, quick ones first."""
    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    found = [kind() for kind in Check.__subclasses__() if kind.__module__.startswith(f"{checks.__name__}.")]
    return sorted(found, key=lambda check: (check.slow, check.name != "ranks", check.name))


def examine(world: World, visit: Visit) -> list[dict[str, Any]]:
    """Return for each check its name, summary, findings, seconds and the ranks' facts; empty except on rank 0. Collective.

    An error within a check ends only that check; see `judged`.
    """
    results = []
    for check in all_checks():
        if check.slow and visit.quick:
            continue
        began = time.perf_counter()
        ranks = world.gather({**whereabouts(world), **_facts(check, world, visit)})
        if world.is_first:
            seconds = time.perf_counter() - began
            results.append(
                {"check": check.name, **judged(check, ranks, visit), "seconds": round(seconds, 2), "ranks": ranks}
            )
    return list(redacted_all(results))


def judged(check: Check, ranks: Sequence[Facts], visit: Visit) -> dict[str, Any]:
    """Return a check's summary, whether it was possible, and its findings, from the facts of all ranks.

    A check that no rank can make, as on a system without /proc, is not here and finds nothing. If only some ranks
    cannot make it, their nodes differ from the others: that is a finding.
    """
    blind = [each for each in ranks if CANNOT in each]
    if not blind:
        return {
            "here": True,
            "seen": check.summary(ranks),
            "findings": [asdict(each) for each in check.judge(ranks, visit)],
        }
    if len(blind) == len(ranks):
        return {"here": False, "seen": blind[0][CANNOT], "findings": []}
    said = f"rank {blind[0]['rank']} on {blind[0]['host']} could not look: {blind[0][CANNOT]}"
    finding = Finding(said, "check that this node is set up like the others", fails=False)
    return {"here": True, "seen": "", "findings": [asdict(finding)]}


def _facts(check: Check, world: World, visit: Visit) -> dict[str, Any]:
    try:
        return check.look(world, visit)
    except (MusterError, DistError):  # a lost rank ends the visit
        raise
    except Exception as error:  # a machine may lack a file, a tool or a call that others have
        return {CANNOT: located(error)}
