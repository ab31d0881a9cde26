"""How an attempt ended, seen by its launcher, and what its substrate is to do next.

torchrun exits with 1 for every failure, also where SIGTERM came and all was saved. What happened stands in
outcome.json, unless that is still the file of an earlier attempt; or in refused.json, of a command that never had the
run. Another job may have written either, so a launcher reads what its own ranks have left (Attempt.launcher).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.errors import Held, Preempted, final

COME_BACK = Preempted.exit_code
MOST_HELD = 20
"""Starts in a row that find the run held by another part of the job, torchrun's restarts among them, until a job that
requeues itself no longer does. Kubernetes has bounds of its own: backoffLimit, maxRestarts."""


@dataclass(frozen=True)
class Policy:
    """Where one substrate differs from another."""

    checks: bool = True
    """A node checks the overrides itself, as nobody did before it."""
    judges: bool = True
    """A node's exit code is the attempt's: its launcher acts on it."""
    forwards_term: bool = True
    """False where SIGTERM comes to every process: a second one would cut torchrun's wait for its workers short."""
    restarts_as: int | None = None
    """The one exit code that is started again, if all others but the final ones (2 to 7) would end the job."""
    requeues: bool = False
    """The job asks for its next attempt itself."""
    again: int = 0
    """How often a node starts its agent again where another part of the job holds the run, as nothing else would."""


SLURM = Policy(checks=False, judges=False, forwards_term=False, requeues=True)  # judged once, by the batch script
SUBMITIT = Policy(checks=False, forwards_term=False, requeues=True)
LOCAL = Policy(checks=False, requeues=True)  # submitit's own controller starts it again
PYTORCHJOB = Policy(restarts_as=143)  # restartPolicy ExitCode: "killed" is restarted, what is below 128 is not
TRAINJOB = Policy()  # a podFailurePolicy tells 2 to 7 from the others
INDEXED_JOB = Policy()
COMPOSE = Policy(checks=False, judges=False, again=5)  # nothing acts on its code: `up` is given again by hand


@dataclass(frozen=True)
class Verdict:
    """What is done next: end with `code`, and ask for another attempt if `requeue`."""

    code: int
    requeue: bool
    line: str


def decide(
    before: Mapping[str, Any], after: Mapping[str, Any], agent_code: int, *, told: bool, policy: Policy
) -> Verdict:
    """`before`, `after`: the records of outcome.json; `told`: whether a signal asked the launcher to stop."""
    if agent_code == 0:
        return Verdict(0, False, "")
    if identity(before) != identity(after):
        code = after.get("exit_code")
        code = code if isinstance(code, int) and code > 0 else agent_code
        said = f": {after['error']}" if after.get("error") else ""
        line = f"{after.get('outcome', 'failed')} (exit code {code}){said}"
    elif told:
        code, line = COME_BACK, "told to stop before a rank began to train"
    else:
        code, line = policy.restarts_as or agent_code, "no rank began to train: the agents' messages above say why"
    if policy.restarts_as and code not in final():
        code = policy.restarts_as
    held = code == Held.exit_code and int(after.get("times_held") or 0) <= MOST_HELD
    return Verdict(code, policy.requeues and (code == COME_BACK or held), line)


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tells two records apart: every write has another time."""
    return {key: record.get(key) for key in ("attempt", "outcome", "time")}
