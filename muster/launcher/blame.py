"""Name a host whose ranks die often, so that the job's next attempt runs without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

DEATHS, WITHIN_S = 5, 3600.0
"""A host is blamed for this many deaths within this time, if more than half of all were there: else the code is to blame."""
MOST = 2
"""The most hosts that a job excludes in all."""


def blamed(events: Iterable[Mapping[str, Any]], *, now: float) -> str:
    """Return the host that is to blame by the events of metrics.jsonl; empty if none is. now: seconds since the epoch."""
    recent = (each for each in events if each["event"] == "survived" and now - each.get("time", 0.0) < WITHIN_S)
    died = Counter(str(each.get("host", "")) for each in recent)
    host, deaths = died.most_common(1)[0] if died else ("", 0)
    return host if deaths >= DEATHS and 2 * deaths > died.total() else ""


def to_exclude(
    events: Iterable[Mapping[str, Any]],
    *,
    nodes: Collection[str],
    usable: Collection[str],
    excluded: Collection[str],
    most: int,
    now: float,
) -> str:
    """Return the node that a job excludes from its next attempt, beside those that it excludes already; empty if none.

    Args:
        events: those of the run's metrics.jsonl.
        nodes: the names of the job's nodes.
        usable: the names of the nodes on which the job could run.
        excluded: the nodes that the job excludes already. The user's own among them do not count for `most`.
        most: the most nodes that are excluded for their deaths.
        now: seconds since the epoch.
    """
    events = list(events)
    host = blamed(events, now=now)
    died_on = {str(each.get("host", "")) for each in events if each["event"] == "survived"}
    is_left = len(set(usable) - set(excluded) - {host}) >= len(nodes)
    return host if host in nodes and is_left and len(died_on & set(excluded)) < most else ""
