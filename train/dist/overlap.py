"""Adds up gradients in shared memory while backward computes the next ones: a communication hook for DDP.

Source: torch.distributed.algorithms.ddp_comm_hooks, "DDP Communication Hooks" in PyTorch's documentation.
"""

from __future__ import annotations

from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from train.dist.shared_memory import SharedMemory


class Overlap:
    """DDP's mean of a bucket over the ranks. A step's last one is added up at once: nothing is left to compute beside it."""

    def __init__(self, memory: SharedMemory):
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduction")  # one: buckets keep their order
        self._begun: list[Job[None]] = []

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Raises DistBackendError for a rank that has ended, at the step's last bucket."""
        mean: Future[Tensor] = Future()
        if not bucket.is_last():
            self._begun.append(self._thread.submit(self._average, bucket.buffer(), mean))
            return mean
        begun, self._begun = self._begun, []
        for job in begun:
            job.result()
        self._average(bucket.buffer(), mean)
        return mean

    def _average(self, gradients: Tensor, mean: Future[Tensor]) -> None:
        self._memory.add_up(gradients, scale=1 / self._memory.size)
        mean.set_result(gradients)
