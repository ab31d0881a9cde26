"""Judge how an attempt ended, for its launcher, and decide the substrate's next action.

torchrun exits with 1 for every failure, even after SIGTERM with all progress saved. The true end is in outcome.json, unless
that is still an earlier attempt's, or in refused.json for a command that never had the run. Another job may have written
either: a launcher reads only the records of its own ranks (Outcome.launcher).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.errors import CrashLoop, Held, Preempted, final
from muster.outcome import DONE, RUNNING

COME_BACK = Preempted.exit_code
UNMET = 69
"""Exit code of script_agent.py: the nodes did not meet, or lost each other."""
UNBEGUN = "unbegun"
"""Entry of a sweep's record: the number of its runs without one."""
SIGNALLED = 128
"""Higher exit codes stand for a signal."""
MOST_HELD = 20
"""A job no longer requeues itself after more starts in a row, torchrun's restarts included, that found the run held by another part
of the job. Kubernetes has its own bounds: backoffLimit, maxRestarts."""


@dataclass(frozen=True)
class Policy:
    """The differences between substrates."""

    checks: bool = True
    """A node checks the overrides: no earlier step has."""
    judges: bool = True
    """A node's exit code is the attempt's: its launcher acts on it."""
    forwards_term: bool = True
    """False if SIGTERM reaches every process: a second one would end torchrun's wait for its workers."""
    restarts_as: int | None = None
    """The only exit code that is restarted, if all others but the final ones (2 to 7) would end the job."""
    fails_as: int | None = None
    """The exit code that ends the job of a failed script, if the substrate would start the script's own again."""
    requeues: bool = False
    """The job requests its next attempt itself."""
    again: int = 0
    """How often a node restarts its agent while another part of the job holds the run, if nothing else would."""


SLURM = Policy(checks=False, judges=False, forwards_term=False, requeues=True)  # judged once, by the batch script
SUBMITIT = Policy(checks=False, forwards_term=False, requeues=True)
LOCAL = Policy(checks=False, requeues=True)  # submitit's own controller restarts it
PYTORCHJOB = Policy(restarts_as=143)  # restartPolicy ExitCode restarts 128 and above ("killed"), not lower codes
TRAINJOB = Policy()  # a podFailurePolicy tells 2 to 7 from the others
INDEXED_JOB = Policy(fails_as=CrashLoop.exit_code)  # any code but 2 to 7 starts a new pod, up to backoffLimit times
THIS_MACHINE = Policy()
COMPOSE = Policy(checks=False, judges=False, again=5)  # nothing acts on its exit code: the user runs `up` again


@dataclass(frozen=True)
class Verdict:
    code: int
    requeue: bool
    line: str


def decide(
    before: Mapping[str, Any], after: Mapping[str, Any], agent_code: int, *, told: bool, policy: Policy
) -> Verdict:
    """Judge the end of an attempt by its records `before` and `after`. `told`: the launcher received a stop signal."""
    if agent_code == 0:
        return Verdict(0, False, "")
    if (
        identity(before) != identity(after) and after.get("outcome") == DONE
    ):  # on the nodes that were left, if one was lost
        return Verdict(0, False, f"done, although its launcher ended with {agent_code}: a node was lost, perhaps")
    code: Any
    if told and after.get(UNBEGUN):
        code, line = COME_BACK, f"stopped between the runs of a sweep: {after[UNBEGUN]} had not begun"
    elif identity(before) != identity(after):
        code = after.get("exit_code")
        code = code if isinstance(code, int) and code > 0 else agent_code
        said = f": {after['error']}" if after.get("error") else ""
        line = f"{after.get('outcome', 'failed')} (exit code {code}){said}"
    elif told:
        code, line = COME_BACK, "stopped before a rank began to train"
    else:
        code, line = policy.restarts_as or agent_code, "no rank began to train: see the agents' messages above"
    if policy.restarts_as and code not in final():
        code = policy.restarts_as
    held = code == Held.exit_code and int(after.get("times_held") or 0) <= MOST_HELD
    return Verdict(code, policy.requeues and (code == COME_BACK or held), line)


@dataclass(frozen=True)
class Requeues:
    so_far: int = 0
    most: int = 100


def decide_script(
    agent_code: int,
    *,
    told: bool,
    lost: str = "",
    said: str = "",
    policy: Policy,
    requeues: Requeues | None = None,
) -> Verdict:
    """Judge how a user's own script ended, by exit codes alone.

    agent_code: of the node's agent (script_agent.py), or the largest of all nodes'.
    told: the launcher received a stop signal.
    lost: names of lost nodes.
    said: how a rank of this node ended, and with which error.
    """
    if agent_code == 0:
        return Verdict(0, False, "")
    if told and agent_code in (
        SIGNALLED + signal.SIGTERM,
        SIGNALLED + signal.SIGINT,
    ):  # before it took signals, and started ranks
        agent_code = COME_BACK
    if agent_code == COME_BACK or lost:
        again, bound = _requeue(requeues if policy.requeues else None)
        line = f"lost {lost}" if lost else f"to be run again (exit code {COME_BACK})"
        return Verdict(policy.restarts_as or COME_BACK, again, line + bound)
    if agent_code == UNMET or agent_code > SIGNALLED:
        line = "the nodes did not meet, or lost each other: see the agents' messages above"
        if agent_code > SIGNALLED:
            line = f"the agent of a node was ended by signal {agent_code - SIGNALLED}"
        return Verdict(policy.restarts_as or 1, False, line)
    why = f": {said}" if said else ""
    line = f"failed (exit code {agent_code}){why}"
    if told:
        line = f"told to stop, and ended with exit code {agent_code}{why}; a script that saves on SIGTERM and leaves with 75 is run again"
    if told and not policy.requeues:  # a pod that is told to stop is replaced, whatever its script makes of it
        return Verdict(policy.restarts_as or 1, False, line)
    return Verdict(policy.fails_as or agent_code, False, line)


def _requeue(requeues: Requeues | None) -> tuple[bool, str]:
    if requeues is None:
        return False, ""
    if requeues.so_far >= requeues.most:
        return False, f"; not requeued again: it was {requeues.so_far} times, MAX_REQUEUES={requeues.most}"
    return True, f"; requeue {requeues.so_far + 1} of at most {requeues.most}"


def before_and_after(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's two records for `decide`; for a sweep nothing, and the record of the run that ended worst.

    A run that has not ended is worse than any that has: the sweep has to go on. If all new records are done, runs without one
    were refused, crashed before they began, or had not begun when the sweep was stopped.

    `before`: each run's record before the attempt, or its identity.
    """
    if len(after) < 2:
        return {**before[0]} if before else {}, {**after[0]} if after else {}
    known = [identity(record) for record in before]
    new = [record for record in after if record and identity(record) not in known]
    found: dict[str, Any] = {}
    if new:
        worst: Mapping[str, Any] = max(new, key=_how_bad)
        found |= worst
    lacking = len(after) - len(new)
    if found.get("outcome") == DONE and lacking:
        said = f"{lacking} of the sweep's {len(after)} runs left no record: see the messages above"
        found |= {"outcome": "failed", "exit_code": None, "error": said, UNBEGUN: lacking}
    return {}, found


def _how_bad(record: Mapping[str, Any]) -> tuple[bool, int]:
    return record.get("outcome") == RUNNING, int(record.get("exit_code") or 0)


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that tell two records apart: every write has a different time."""
    return {key: record.get(key) for key in ("attempt", "outcome", "time")}
