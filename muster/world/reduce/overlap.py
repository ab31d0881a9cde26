"""DDP communication hook that sums gradients in shared memory while backward computes the next ones.

Source: torch.distributed.algorithms.ddp_comm_hooks, "DDP Communication Hooks" in PyTorch's documentation.
"""

from __future__ import annotations

from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from muster.world.reduce.shared_memory import SharedMemory


class Overlap:
    """Averages each DDP bucket over the ranks.

    A thread reduces all buckets of a step but the last, for which no computation is left to overlap: the caller reduces it.
    """

    def __init__(self, memory: SharedMemory):
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduction")  # keeps bucket order
        self._begun: list[Job[None]] = []

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the bucket's mean. A step's last bucket raises DistBackendError if a rank has ended."""
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
