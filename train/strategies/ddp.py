"""DistributedDataParallel: a replica on every rank, gradients averaged by all-reduce while backward runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config.keys import Config, NonFinite, Precision
from train.config.marks import FREE, Ge, Gt
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, SavedTensor, StepResult
from train.strategies.optimizer_step import OptimizerStep, Stepping, build_model
from train.strategies.powersgd import PowerSgd
from train.strategies.slices import SlicedStep

HALVES = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class Ddp(Stepping):
    """DDP over all ranks; with one rank, plain training."""

    takes_slices = True
    step_class: type[OptimizerStep] = OptimizerStep
    options: Mapping[str, Any] = {"gradient_as_bucket_view": True}
    sync_batchnorm = False
    compression = "none"
    powersgd: PowerSgd | None = None

    def __init__(
        self,
        *,
        bucket_cap_mb: Annotated[float, Gt(0), FREE],
        gradient_as_bucket_view: Annotated[bool, FREE],
        static_graph: Annotated[bool, FREE],
        find_unused_parameters: bool,
        sync_batchnorm: bool,
        compression: Literal["none", "bf16", "fp16", "powersgd"],
        powersgd_rank: Annotated[int, Ge(1)],
        powersgd_warm_up_steps: Annotated[int, Ge(2)],
    ):
        self.sync_batchnorm, self.compression = sync_batchnorm, str(compression)
        self.powersgd_options = {"rank": powersgd_rank, "warm_up_steps": powersgd_warm_up_steps}
        self.options = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }

    @property
    def caveat(self) -> str:
        if self.compression != "powersgd":
            return ""
        return "strategy.compression=powersgd: a resume at another world size forgets what the compression has missed so far"

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        for option in ("sync_batchnorm", "compression") if config.virtual_world_size else ():
            if (value := getattr(self, option)) not in (False, "none"):
                said = f"strategy.{option}={str(value).lower()} and virtual_world_size={config.virtual_world_size}"
                raise ConfigError(f"{said}: the ranks' true number would be seen in the weights; leave one out")
        if self.compression == "powersgd" and config.precision is Precision.fp16:
            raise ConfigError("strategy.compression=powersgd does not go with precision=fp16: use fp32 or bf16")
        if self.compression == "powersgd" and config.on_nonfinite is NonFinite.skip:
            raise ConfigError(
                "strategy.compression=powersgd would remember a gradient that is not finite: use on_nonfinite=stop"
            )

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, self.model = world, build_model(recipe, world.device)
        if self.sync_batchnorm and world.device.type != "cuda":
            raise ConfigError("strategy.sync_batchnorm=true needs CUDA devices: torch has it for no other")
        if self.sync_batchnorm and world.size > 1:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        if recipe.compile:
            self.model.compile()
        self.wrap(recipe)

    def wrap(self, recipe: Recipe) -> None:
        """Make the optimizer step, which goes through DDP where there is more than one rank. Collective."""
        world = self.world
        parts: dict[str, Any] = {"world": world, "layout": self.layout(world.size), "model": self.model}
        if recipe.slices:
            self.warmed_up = True
            self.optimizer_step = SlicedStep(recipe, slices=recipe.slices, **parts)
            return
        places_matter = world.size > 2 or self.compression == "powersgd"
        self.warmed_up = world.size == 1 or not (places_matter or self.options.get("static_graph"))
        wrapped = self._wrap(self.model) if world.size > 1 else {}
        self.optimizer_step = self.step_class(recipe, **parts, **wrapped)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step, before the first of which a warm-up step makes DDP lay out its buckets.

        DDP does so after its first backward. With three ranks and more the place in a bucket decides the order in
        which a sum is made, so without a warm-up the first step after a resume would round differently from the same
        step of an uninterrupted run. A static graph cannot begin within no_sync either, and PowerSGD's memory is by
        bucket.
        """
        if not self.warmed_up:
            self.warmed_up = True
            self.optimizer_step.warm_up(batches)
        if self.powersgd:
            self.powersgd.begin(step)
        return self.optimizer_step.step(step, batches)

    def state(self) -> dict[str, Any]:
        return super().state() | (self.powersgd.state() if self.powersgd else {})

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return super().targets(saved) | (self.powersgd.targets(saved) if self.powersgd else {})

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.powersgd:
            self.powersgd.load(state)

    def _wrap(self, model: nn.Module) -> dict[str, Any]:
        """How the optimizer step goes through DDP."""
        ddp = DistributedDataParallel(model, device_ids=self._device_ids(), **self.options)
        if hook := HALVES.get(self.compression):
            # By its name torch refuses the hook for bf16 where there is no NCCL, though gloo adds up bf16 as well.
            ddp.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
        if self.compression == "powersgd":
            self.powersgd = PowerSgd(ddp, self.world, **self.powersgd_options)
        return {"forward": ddp, "no_sync": ddp.no_sync}

    def _device_ids(self) -> list[torch.device] | None:
        """Where inputs are brought; None where the model sees to that."""
        return [self.world.device] if self.world.device.type == "cuda" else None
