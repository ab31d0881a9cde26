"""DistributedDataParallel: a replica on every rank, gradients averaged by all-reduce while backward runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config.marks import FREE, Gt
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, SavedTensor, StepResult, Strategy
from train.strategies.optimizer_step import OptimizerStep, build_model


class Ddp(Strategy):
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
        self.warmed_up = world.size == 1 or (world.size == 2 and not static_graph)

    @property
    def lr(self) -> float:
        return self.optimizer_step.lr

    def build(self, recipe: Recipe) -> None:
        self.model = build_model(recipe, self.world.device)
        if self.sync_batchnorm and self.world.size > 1:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        if recipe.compile:
            self.model.compile()
        if self.world.size == 1:
            self.optimizer_step = OptimizerStep(recipe, world=self.world, model=self.model)
            return
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        ddp = DistributedDataParallel(self.model, device_ids=device_ids, **self.options)
        self.optimizer_step = OptimizerStep(
            recipe, world=self.world, model=self.model, forward=ddp, no_sync=ddp.no_sync
        )

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step, before the first of which a warm-up step makes DDP lay out its buckets.

        DDP does so after its first backward. With three ranks and more the place in a bucket decides the order in
        which a sum is made, so without a warm-up the first step after a resume would round differently from the same
        step of an uninterrupted run. A static graph cannot begin within no_sync either.
        """
        if not self.warmed_up:
            self.warmed_up = True
            self.optimizer_step.warm_up(batches)
        return self.optimizer_step.step(step, batches)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return self.optimizer_step.evaluate(batch)

    def is_finite(self) -> bool:
        return self.optimizer_step.is_finite()

    def sync_parameters(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return self.optimizer_step.state()

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return self.optimizer_step.targets(saved)

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer_step.load(state)

    def weights(self) -> dict[str, Tensor]:
        return self.optimizer_step.weights()
