"""Name a node whose ranks die often, or that the doctor has refused, so that the job's next attempt runs without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

DEATHS, WITHIN_S = 5, 3600.0
"""A node is blamed for this many deaths within this time, if more than half of all were there: else the code is to blame."""
MOST = 2
"""The most nodes that a job excludes in all."""


def blamed(events: Iterable[Mapping[str, Any]], nodes: Collection[str], *, now: float) -> str:
    """Return the one of at least two `nodes` that is to blame by the events of metrics.jsonl; empty if none is.

    now: seconds since the epoch.
    """
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
    """Return the node that a job excludes from its next attempt, beside those that it excludes already; empty if none.

    Args:
        events: those of the run's metrics.jsonl.
        nodes: the names of the job's nodes.
        usable: name -> features, devices, processors and memory of the nodes of the job's partition that are up. As many
            nodes like the excluded one must be left as the job has, or it would wait for ever.
        excluded: the nodes that the job excludes already. The user's own among them do not count for `most`.
        most: the most nodes that are excluded for their deaths, and the most requeues that the doctor's word is heard for.
        now: seconds since the epoch.
        refused: the host that the doctor has refused, if it is one of `nodes`.
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
