"""How many loader workers a rank starts, and whether shared memory, through which they pass batches, is large enough."""

from __future__ import annotations

import os
import shutil

from muster.errors import ConfigError
from muster.process import ranks_on_host

MOST = 16
"""Number of workers of a rank beyond which more are not started unless they are asked for."""
SHARED = "/dev/shm"


def by_default(batch_bytes: int) -> int:
    """Return the number of workers of a rank on a GPU: its share of the host's cores, as far as shared memory has room.

    They take at most half of what is free. batch_bytes: size of a micro-batch.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(MOST, max(1, cores // ranks_on_host()))
    if not os.path.isdir(SHARED):
        return most
    batches = shutil.disk_usage(SHARED).free // 2 // ranks_on_host() // max(1, batch_bytes)
    return max(0, min(most, (batches - 1) // 2))


def check_shared_memory(batch_bytes: int, *, num_workers: int, place: str = SHARED) -> None:
    """Check that the shared memory of this host is large enough for the batches that all its ranks' workers pass.

    When it is full, a batch is lost and the trainer waits for it forever.

    Raises:
        ConfigError: there is not enough for the batches in flight.
    """
    if not os.path.isdir(place):
        return
    ranks = ranks_on_host()
    needed, free = ranks * batch_bytes * (2 * num_workers + 1), shutil.disk_usage(place).free
    if needed > free:
        of = f"the {ranks} ranks of this host need" if ranks > 1 else "this rank needs"
        raise ConfigError(
            f"loader.num_workers={num_workers}: {of} about {needed / 2**20:.1f} MiB of {place}, and {free / 2**20:.1f} are free: make it "
            "larger (docker --shm-size, a Kubernetes emptyDir with medium: Memory), or set fewer workers or a smaller micro_batch_size"
        )
