"""Deaths that a test has planned: FAULTS=POINT@STEP:RANK,... ends a rank by SIGKILL where its code says `fault(POINT, STEP)`.

POINT@STEP:RANK:supervisor ends the rank's supervisor with it, and POINT@STEP:RANK:later happens after another death, as when steps are
repeated. Each happens once, as a file in FAULTS_MADE (the current folder) says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.until import until
from muster import process
from muster.recovery import survival


def fail_at(rank: int, step: int, point: str = "step", *, supervisor: bool = False) -> str:
    """Return the plan of a death for FAULTS; several are joined by commas."""
    return f"{point}@{step}:{rank}{':supervisor' * supervisor}"


SUPERVISORS_DIE = fail_at(0, 0, "by the test", supervisor=True)
"""FAULTS of a test that itself kills a supervisor."""


def planned() -> Iterator[tuple[str, str, int, int]]:
    """Yield the plan, the point, the step and the rank of each death."""
    for plan in filter(None, os.environ.get("FAULTS", "").split(",")):
        point, _, place = plan.partition("@")
        step, rank, *_ = place.split(":")
        yield plan, point, int(step), int(rank)


def made() -> Path:
    """Return the folder with a file for each death that has happened."""
    return Path(os.environ.get("FAULTS_MADE", "."))


def is_planned(point: str, step: int) -> bool:
    """Whether some rank is to die there, and has not yet."""
    return any((point, step) == (where[0], where[1]) and not (made() / plan).exists() for plan, *where in planned())


def fault(point: str, step: int, *, ready: Callable[[], object] = lambda: None) -> None:
    """Die here if it is planned, once `ready` has returned."""
    here = (point, step, int(os.environ.get("RANK", "0")))
    for plan, *where in planned():
        is_early = plan.endswith(":later") and not any("@" in each.name for each in made().iterdir())
        if (*where,) == here and not is_early and not (made() / plan).exists():
            ready()
            (made() / plan).touch()
            if plan.endswith(":supervisor") and process.is_supervised():
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def saved(step: int, every: int) -> Callable[[], object]:
    """Return a `ready` that waits for the checkpoint before `step`: a run of milliseconds a step is faster than a busy disk."""
    last = (step - 1) // every * every

    def is_there() -> bool:
        return last <= 0 or any(int(each.name[5:]) >= last for each in Path("run/checkpoints").glob("step-*"))

    return lambda: until(is_there, f"checkpoint of step {last}", timeout_s=60)


# Of a machine that is busy with other tests. With a supervisor's death the others must not wait for a replacement for as long as
# heartbeat.DESERTED_S, or the ranks that wait for them leave before they could save.
if ":supervisor" not in os.environ.get("FAULTS", ""):
    survival.REPLACEMENT_S = 10.0
