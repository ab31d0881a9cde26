"""Deaths that a test has planned: FAULTS=POINT@STEP:RANK,... ends a rank by SIGKILL where its code says `fault(POINT, STEP)`.

POINT@STEP:RANK:keeper ends the rank's keeper with it, and POINT@STEP:RANK:later happens after another death, as when steps are
repeated. Each happens once, as a file in FAULTS_MADE (the current folder) says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from muster import process
from muster.recovery import survival


def fail_at(rank: int, step: int, point: str = "step", *, keeper: bool = False) -> str:
    """Return the plan of a death for FAULTS; several are joined by commas."""
    return f"{point}@{step}:{rank}{':keeper' * keeper}"


KEEPERS_DIE = fail_at(0, 0, "by the test", keeper=True)
"""FAULTS of a test that itself kills a keeper."""


def planned() -> Iterator[tuple[str, str, int, int]]:
    """Yield the plan, the point, the step and the rank of each death."""
    for plan in filter(None, os.environ.get("FAULTS", "").split(",")):
        point, _, place = plan.partition("@")
        step, rank, *_ = place.split(":")
        yield plan, point, int(step), int(rank)


def made() -> Path:
    """Return the folder with a file for each death that has happened."""
    return Path(os.environ.get("FAULTS_MADE", "."))


def fault(point: str, step: int, *, ready: Callable[[], object] = lambda: None) -> None:
    """Die here if it is planned, once `ready` has returned."""
    here = (point, step, int(os.environ.get("RANK", "0")))
    for plan, *where in planned():
        is_early = plan.endswith(":later") and not any("@" in each.name for each in made().iterdir())
        if (*where,) == here and not is_early and not (made() / plan).exists():
            ready()
            (made() / plan).touch()
            if plan.endswith(":keeper") and process.is_kept():
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


# Of a machine that is busy with other tests. With a keeper's death the others must not wait for a birth for as long as
# heartbeat.DESERTED_S, or the ranks that wait for them leave before they could save.
if ":keeper" not in os.environ.get("FAULTS", ""):
    survival.BORN_S = 10.0
