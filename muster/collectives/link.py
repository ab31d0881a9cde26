"""Point-to-point messages within a process group, with a count of the bytes sent."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

COUNTERS = Path("/proc/self/io")


class Link:
    """This rank's connections within a process group. Peers are given by their rank in the group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def send(self, tensor: Tensor, *, to: int) -> None:
        """Send `tensor`, and wait until it may be overwritten. Empty tensors are neither sent nor received."""
        if tensor.numel():
            dist.send(tensor, group=self.group, group_dst=to)
            self.sent_bytes += tensor.nbytes

    def receive(self, tensor: Tensor, *, source: int) -> None:
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=source)

    def exchange(self, sent: Tensor, *, to: int, received: Tensor, source: int) -> None:
        """Send and receive at the same time: a circle of ranks that all send first would deadlock."""
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.sent_bytes += sent.nbytes


def written_bytes() -> int | None:
    """Return the bytes that this process has passed to write(2) and similar calls, which gloo uses; None if unknown.

    Source: proc_pid_io(5), wchar.
    """
    try:
        counters = dict(line.split(": ") for line in COUNTERS.read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return int(counters["wchar"])
