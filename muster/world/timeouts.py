"""The timeout of collectives, the same for the default process group and those of a mesh.

faults/heartbeat.py finds hangs: it tells a long phase from a hang, which a collective's own timeout cannot.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

LAST_RESORT_S = 3 * 3600.0
_extended: list[timedelta] = []
"""The timeout of the default group, once it is extended."""


def extend(timeout_s: float) -> None:
    """Let collectives of the default group wait longer than a rank may stand still, `timeout_s`."""
    _extended[:] = [timedelta(seconds=LAST_RESORT_S + timeout_s)]
    set_timeout(None)


def set_timeout(group: dist.ProcessGroup | None) -> None:
    """Give `group` (None: the default one) the timeout of the default group; torch gives a new group 10 or 30 minutes."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # its name before torch 2.15
    if _extended:
        change(_extended[0], group)
