"""DistributedDataParallel: a replica on every rank, gradients averaged by all-reduce while backward runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.config.marks import FREE, Gt
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import StepResult
from train.strategies.single import Single


class Ddp(Single):
    """DDP over all ranks; with one rank, plain training."""

    def __init__(
        self,
        *,
        world: World,
        bucket_cap_mb: Annotated[float, Gt(0), FREE],
        gradient_as_bucket_view: Annotated[bool, FREE],
        static_graph: Annotated[bool, FREE],
        find_unused_parameters: bool,
        sync_batchnorm: bool,
    ):
        if sync_batchnorm and world.device.type != "cuda":
            raise ConfigError("strategy.sync_batchnorm=true needs CUDA devices: torch has it for no other")
        self.world, self.sync_batchnorm = world, sync_batchnorm
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }
        self.rehearsed = world.size == 1 or (world.size == 2 and not static_graph)

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.sync_batchnorm and self.world.size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.world.size == 1:
            return model
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=device_ids, **self.options)
        return self.ddp

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.ddp.no_sync() if self.world.size > 1 else contextlib.nullcontext()

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        if not self.rehearsed:
            self._rehearse(batches)
        return super().step(step, batches)

    def _rehearse(self, batches: list[Batch]) -> None:
        """One forward and backward whose gradient is thrown away, at every start and resume.

        DDP lays out its buckets anew after the first backward. With three ranks and more the place in a bucket
        decides the order in which a sum is made, so without this the first step after a resume would round
        differently from the same step of an uninterrupted run. A static graph cannot begin within no_sync either.
        """
        self.rehearsed = True
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        self._backward(batches[-1:])
        self.optimizer.zero_grad()
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1])
