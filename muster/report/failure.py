"""What a failed run's page and live view say about the failure."""

from __future__ import annotations

from muster import outcome
from muster.report.history import History

FINE = {outcome.DONE, outcome.PREEMPTED, outcome.RUNNING, "none"}


def has_failed(history: History) -> bool:
    return history.state not in FINE


def where(history: History) -> str:
    """Return rank, host and step of the failure."""
    rank, host, step = (history.outcome.get(name) for name in ("rank", "failed_host", "step"))
    said = [f"rank {rank}" if rank is not None else "", f"on {host}" if host else ""]
    return " ".join(part for part in (*said, "before the first step" if step is None else f"after step {step}") if part)


def command(history: History) -> str:
    """Return the shell command of the last attempt that reached training; empty if it is not known to resume the run."""
    facts = history.stretches[-1].facts.get("environment", {}) if history.stretches else {}
    return str(facts["command"]) if facts.get("resumes") else ""


def resumes(history: History) -> str:
    """Return from where `command` resumes the run, with a colon if it is known."""
    saves = history.of_event("checkpoint")
    point = f"the checkpoint of step {saves[-1]['step']}" if saves else "the beginning: there is no checkpoint"
    return f"The same command resumes the run from {point}{': ' if command(history) else '.'}"
