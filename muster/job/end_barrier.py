"""Check over the store that the loops of all ranks have ended after the same step.

A collective of a rank that has left the loop would meet those of ranks that still train, and gloo ends a process whose
peer sends another number of bytes.
"""

from __future__ import annotations

import socket
import time

from torch.distributed import DistBackendError

from muster.errors import ConfigError
from muster.faults.heartbeat import Heartbeat
from muster.world.group import World

LEAVE_ALIKE = "all ranks must leave the loop after the same step"
POLL_S = 0.02
POLLS_PER_S = 2000.0  # of all ranks together


def end_alike(world: World, heartbeat: Heartbeat, step: int) -> None:
    """Wait until the loops of all ranks have ended, this rank's after `step`. Collective.

    Raises ConfigError: a loop has ended after another step, or waits in a collective for this rank.
    Raises DistBackendError: another rank has failed, or has died.
    """
    if world.size == 1:
        return
    store_keys, pause_s = world.store_keys, max(POLL_S, world.size / POLLS_PER_S)
    store_keys.post_end(step)
    heartbeat.watch()
    while (ends := store_keys.ends()) is None:
        if store_keys.has_failure() or store_keys.is_one_lost():
            raise DistBackendError("another rank has failed while this one waited for the end of its loop")
        if heartbeat.is_waited_for():
            raise ConfigError(
                f"the loop has ended after step {step} on rank {world.rank} ({socket.gethostname()}), for which other ranks "
                f"wait in a later one: {LEAVE_ALIKE}"
            )
        time.sleep(pause_s)
    for rank, end in enumerate(ends):
        if end != ends[0]:
            raise ConfigError(
                f"the loop has ended after step {end} on rank {rank}, and after step {ends[0]} on rank 0: {LEAVE_ALIKE}"
            )
