"""Name a node to exclude from the job's next attempt: its ranks die often, or the doctor has refused it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

DEATHS, WITHIN_S = 5, 3600.0
"""Blame a node for this many deaths within this time, if it had more than half of all: else the code is to blame."""
MOST = 2
"""The most nodes that a job excludes in all."""


def blamed(events: Iterable[Mapping[str, Any]], nodes: Collection[str], *, now: float) -> str:
    """Return the node to blame, by the events of metrics.jsonl; empty if none is, or if there is one node alone."""
    recent = (each for each in events if each["event"] == "survived" and now - each.get("time", 0.0) < WITHIN_S)
    died = Counter(node for each in recent if (node := _node(each)) in {_short(name) for name in nodes})
    short, deaths = died.most_common(1)[0] if died else ("", 0)
    is_to_blame = len(nodes) > 1 and deaths >= DEATHS and 2 * deaths > died.total()
    return next(name for name in nodes if _short(name) == short) if is_to_blame else ""


def to_exclude(
    events: Iterable[Mapping[str, Any]],
    *,
    nodes: Collection[str],
    usable: Mapping[str, str],
    excluded: Collection[str],
    most: int,
    now: float,
    refused: str = "",
    so_far: int = 0,
) -> str:
    """Return one more node to exclude from the job's next attempt; empty if none.

    events: those of metrics.jsonl.
    usable: name -> features, devices, processors and memory of the partition's nodes that are up. As many nodes like the
        excluded one must be left as the job has, or it would wait for ever.
    excluded: nodes excluded already. The user's own among them do not count for `most`.
    most: the most nodes that are excluded for deaths, and the most requeues up to which the doctor's refusal counts.
    now: seconds since the epoch.
    refused: the host that the doctor has refused.
    so_far: how often the job was requeued.
    """
    events = list(events)
    by_doctor = next((name for name in nodes if refused and _short(name) == _short(refused)), "")
    node = by_doctor or blamed(events, nodes, now=now)
    if refused and (not by_doctor or so_far >= most or len(nodes) == 1):
        return ""
    died_on = {_node(each) for each in events if each["event"] == "survived"}
    left = [name for name in usable.keys() - {node, *excluded} if usable[name] == usable.get(node)]
    is_bounded = len(died_on & {_short(name) for name in excluded}) < most
    return node if node and is_bounded and len(left) >= len(nodes) else ""


def _node(event: Mapping[str, Any]) -> str:
    return _short(str(event.get("host", "")))


def _short(name: str) -> str:
    """Return a host's name without its domain, which schedulers leave out."""
    return name.partition(".")[0]
