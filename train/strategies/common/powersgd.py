"""PowerSGD: each gradient goes over the wire as two thin matrices, and what they miss is added to the next one.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
(https://arxiv.org/abs/1905.13727).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from train.checkpoint.trained import SavedTensor, own_prefix
from train.dist.world import World

NEVER_BY_ZERO = 1e-8  # torch's default of 0 makes NaN of a layer whose gradient is zero


class PowerSgd:
    """torch's PowerSGD hook on `ddp`, with a state that a checkpoint can hold.

    Args:
        rank: of the approximation; the thin matrices of an [n, m] gradient are [n, rank] and [rank, m].
        warm_up_steps: so many of the run's steps, 2 at least, go uncompressed.
    """

    def __init__(self, ddp: DistributedDataParallel, world: World, *, rank: int, warm_up_steps: int):
        self.rank, self.world = rank, world
        self.hook_state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=warm_up_steps,
            orthogonalization_epsilon=NEVER_BY_ZERO,
        )
        self._own = f"{own_prefix(world.rank)}powersgd/"
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self._buckets: dict[int, list[str]] = {}
        # DDP compares a hook's annotations with types, and here they are text: a lambda has none.
        ddp.register_comm_hook(self.hook_state, lambda state, bucket: self._hook(state, bucket))

    def begin(self, step: int) -> None:
        """The next backward pass is that of global step `step`."""
        self.hook_state.iter = step

    def state(self) -> dict[str, Any]:
        """This rank's own."""
        if not self._buckets:
            return {}
        plain = {f"{self._own}layout": {"rank": self.rank, "buckets": self._buckets}}
        return {
            **plain,
            **{f"{self._own}{kind}/{i}": t for kind, all_ in self._memory.items() for i, t in all_.items()},
        }

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """What to read this rank's own among the `saved` tensors into."""
        own = {name: facts for name, facts in saved.items() if name.startswith(self._own)}
        return {name: torch.empty(f.size, dtype=f.dtype, device=self.world.device) for name, f in own.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave, if it is there and of the same rank."""
        layout = state.get(f"{self._own}layout")
        if layout is None or layout["rank"] != self.rank:
            return
        self._buckets = layout["buckets"]
        for kind, memory in self._memory.items():
            for index in self._buckets:
                memory[index] = state[f"{self._own}{kind}/{index}"]

    @property
    def _memory(self) -> dict[str, dict[int, Tensor]]:
        hook_state = self.hook_state
        return {"error": hook_state.error_dict, "p": hook_state.p_memory_dict, "q": hook_state.q_memory_dict}

    def _hook(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        if state.iter >= state.start_powerSGD_iter:
            self._match(bucket)
        return powerSGD_hook(state, bucket)

    def _match(self, bucket: dist.GradBucket) -> None:
        """The memory is by bucket: where a bucket holds other parameters than before, it begins anew."""
        index, names = bucket.index(), [self._names[parameter] for parameter in bucket.parameters()]
        if self._buckets.get(index) != names:
            self._buckets[index] = names
            for memory in self._memory.values():
                memory.pop(index, None)
