"""DistributedDataParallel: a replica on every rank, gradients averaged by all-reduce while backward runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from typing import Annotated, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.config.marks import FREE, Gt
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, StepResult
from train.strategies.optimizer_step import Stepping, build_model
from train.strategies.slices import optimizer_step


class Ddp(Stepping):
    """DDP over all ranks; with one rank, plain training."""

    takes_slices = True

    def __init__(
        self,
        *,
        bucket_cap_mb: Annotated[float, Gt(0), FREE],
        gradient_as_bucket_view: Annotated[bool, FREE],
        static_graph: Annotated[bool, FREE],
        find_unused_parameters: bool,
        sync_batchnorm: bool,
    ):
        self.sync_batchnorm = sync_batchnorm
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, world.device)
        self.warmed_up = world.size == 2 and not self.options["static_graph"]
        if self.sync_batchnorm and recipe.slices:
            raise ConfigError(
                "strategy.sync_batchnorm=true and virtual_world_size: each slice has statistics of its own; leave one out"
            )
        if self.sync_batchnorm and world.device.type != "cuda":
            raise ConfigError("strategy.sync_batchnorm=true needs CUDA devices: torch has it for no other")
        if self.sync_batchnorm and world.size > 1:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        if recipe.compile:
            self.model.compile()
        wrapped = self._wrap(self.model) if world.size > 1 and not recipe.slices else {}
        self.warmed_up = self.warmed_up or not wrapped
        layout = self.layout(world.size)
        self.optimizer_step = optimizer_step(recipe, world=world, layout=layout, model=self.model, **wrapped)

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

    def _wrap(self, model: nn.Module) -> dict[str, Any]:
        """How the optimizer step goes through DDP."""
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=device_ids, **self.options)
        return {"forward": ddp, "no_sync": ddp.no_sync}
