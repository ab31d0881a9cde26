"""A replica of the model on every rank; torch's DDP averages the gradients during the backward pass.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import FREE, Gt
from muster.train.config.keys import Config
from muster.train.models.frozen import mark, marked
from muster.train.strategies.base import Recipe, StepResult
from muster.train.strategies.step.gradient import refuse_sparse, sparse_in
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping, build_model
from muster.train.strategies.step.skip_dynamo import answered_for_dynamo
from muster.train.strategies.step.virtual_ranks import SlicedStep
from muster.world.group import World
from muster.world.reduce.shared_memory import SharedMemory


class Replicas(Stepping):
    """DDP over all ranks; plain training on one rank."""

    step_class: type[OptimizerStep] = OptimizerStep
    honours = frozenset({*Stepping.honours, "compile", "channels_last"})
    reduced: Sequence[str] = ()
    """Names of the parameters that DDP reduces, in its index order: those that required a gradient at its creation."""

    def build(self, recipe: Recipe, world: World) -> None:
        self.world = world
        self.model = self.place(build_model(recipe, world.device))
        if recipe.compile:
            self.model.compile()
        self.wrap(recipe)

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model as this rank trains it; a hook for subclasses."""
        return model

    def wrap(self, recipe: Recipe) -> None:
        """Build the optimizer step, with DDP if there is more than one rank. Collective."""
        world = self.world
        parts: dict[str, Any] = {"world": world, "layout": self.layout(world.size), "model": self.model}
        if recipe.slices:
            refuse_sparse(self.model, f"virtual_world_size={recipe.slices}")
            self.warmed_up = True
            self.optimizer_step = SlicedStep(recipe, slices=recipe.slices, **parts)
            return
        self.warmed_up = world.size == 1 or not self.needs_warm_up()
        if world.size > 1:
            ddp = self.distributed(self.model)
            parts |= {"forward": ddp, "no_sync": ddp.no_sync}
        self.optimizer_step = self.step_class(recipe, **parts)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """Raises ConfigError: a parameter got no gradient in the previous step."""
        self.warm_up(batches)
        try:
            return super().step(step, batches)
        except RuntimeError as error:
            raise self.unused(error) or error from None

    def unused(self, error: RuntimeError) -> ConfigError | None:
        """Turn DDP's error about parameters without a gradient in the previous step into one line; None for others."""
        if "Expected to have finished reduction" not in str(error):
            return None
        said = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [self.reduced[int(number)] for number in said[1].split()] if said else []
        which = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "some parameters"
        parameters = dict(self.model.named_parameters())
        if frozen := [name for name in names if not parameters[name].requires_grad]:
            return ConfigError(
                f"{frozen[0]} got no gradient: it required one when DDP was built, and does not now; freeze it from the start "
                "(freeze=[...]), or set strategy.find_unused_parameters=true"
            )
        return ConfigError(
            f"{which} got no gradient: let the loss depend on all parameters, freeze them (freeze=[...]), or set "
            "strategy.find_unused_parameters=true"
        )

    def warm_up(self, batches: list[Batch]) -> None:
        """Before the first step, run a step whose only effect is DDP's bucket layout. Collective."""
        if not self.warmed_up:
            self.warmed_up = True
            self.optimizer_step.warm_up(batches)

    def needs_warm_up(self) -> bool:
        """Return True if the bucket layout changes the rounding of a gradient sum.

        DDP rebuilds its buckets after its first backward pass. With three or more ranks, the position in a bucket decides the order of
        summation: without a warm-up, the first step after a resume would round differently from that of an uninterrupted run.
        """
        return self.world.size > 2 and not self.sums_in_memory()  # which sums in rank order

    def distributed(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the model in DDP. Collective."""
        self.reduced = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        with answered_for_dynamo():
            ddp = DistributedDataParallel(model, device_ids=self.device_ids(), **self.ddp_options())
        self.choose_reduction(ddp)
        return ddp

    def sums_in_memory(self) -> bool:
        """Return True if gradients are summed in shared memory: if the ranks have it, but gloo reduces sparse ones."""
        return bool(self.world.memory) and not sparse_in(self.model)

    def choose_reduction(self, ddp: DistributedDataParallel) -> None:
        if self.world.memory and self.sums_in_memory():
            ddp.register_comm_hook(Overlap(self.world.memory), lambda overlap, bucket: overlap(bucket))

    def ddp_options(self) -> Mapping[str, Any]:
        return {"gradient_as_bucket_view": True}

    def device_ids(self) -> list[torch.device] | None:
        """The device that DDP moves inputs to; None on the CPU, or if the model moves them itself."""
        return [self.world.device] if self.world.device.type == "cuda" else None


@dataclass(kw_only=True, eq=False)
class ConfiguredReplicas(Replicas):
    bucket_cap_mb: Annotated[float, Gt(0), FREE]
    gradient_as_bucket_view: Annotated[bool, FREE]
    static_graph: Annotated[bool, FREE]
    find_unused_parameters: bool
    sync_batchnorm: bool

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        self.refuse_with_slices(config, sync_batchnorm=self.sync_batchnorm)

    def refuse_with_slices(self, config: Config, **options: bool | str) -> None:
        """Raise ConfigError for an enabled option with which the result would depend on the world size."""
        for option, value in options.items() if config.virtual_world_size else ():
            if value not in (False, "none"):
                said = f"strategy.{option}={str(value).lower()} and virtual_world_size={config.virtual_world_size}"
                raise ConfigError(f"{said}: the weights would depend on the world size; leave one out")

    def place(self, model: nn.Module) -> nn.Module:
        """Convert batch norm to SyncBatchNorm if configured. Raises ConfigError without CUDA devices."""
        if self.sync_batchnorm and self.world.device.type != "cuda":
            raise ConfigError("strategy.sync_batchnorm=true needs CUDA devices: torch supports no other")
        if self.sync_batchnorm and self.world.size > 1:
            names = marked(model)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
            mark(model, names)
        return model

    def needs_warm_up(self) -> bool:
        """Also for a static graph, whose first iteration cannot run within `no_sync`."""
        return self.static_graph or super().needs_warm_up()

    def ddp_options(self) -> Mapping[str, Any]:
        names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
        return {name: getattr(self, name) for name in names}


class Overlap:
    """DDP communication hook that averages buckets in shared memory while backward computes the next gradients.

    A thread reduces all buckets of a step but the last, for which no computation is left to overlap: the caller reduces it.

    Source: torch.distributed.algorithms.ddp_comm_hooks, "DDP Communication Hooks" in PyTorch's documentation.
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
