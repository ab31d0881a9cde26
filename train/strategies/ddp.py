"""DistributedDataParallel, with optional compression of the gradients that are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import Ge
from muster.train.config.keys import Config, NonFinite, Precision
from muster.train.strategies.base import StepResult
from muster.train.strategies.replicas.replicated import ConfiguredReplicas
from muster.world.group import World

HALVES = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
NEVER_BY_ZERO = 1e-8  # torch's default of 0 gives NaN for a layer whose gradient is zero


@dataclass(kw_only=True, eq=False)
class Ddp(ConfiguredReplicas):
    compression: Literal["none", "bf16", "fp16", "powersgd"]
    powersgd_rank: Annotated[int, Ge(1)]
    powersgd_warm_up_steps: Annotated[int, Ge(2)]

    honours = frozenset({*ConfiguredReplicas.honours, "virtual_world_size"})

    def __post_init__(self) -> None:
        self.powersgd: PowerSgd | None = None

    @property
    def caveat(self) -> str:
        if self.compression != "powersgd":
            return ""
        return "strategy.compression=powersgd: a resume at another world size forgets what the compression has missed so far"

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        self.refuse_with_slices(config, compression=self.compression)
        if self.compression == "powersgd" and config.precision is Precision.fp16:
            raise ConfigError("strategy.compression=powersgd cannot be combined with precision=fp16: use fp32 or bf16")
        if self.compression == "powersgd" and config.on_nonfinite is NonFinite.skip:
            raise ConfigError(
                "strategy.compression=powersgd would keep a non-finite gradient in its error: use on_nonfinite=stop"
            )

    def sums_in_memory(self) -> bool:
        return self.compression == "none" and super().sums_in_memory()

    def choose_reduction(self, ddp: DistributedDataParallel) -> None:
        if self.compression == "none":
            super().choose_reduction(ddp)
        if hook := HALVES.get(self.compression):
            # torch recognizes the bf16 hook by name and rejects it without NCCL, although gloo reduces bf16, too; a
            # lambda has another name.
            ddp.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
        if self.compression == "powersgd":
            self.powersgd = PowerSgd(
                ddp, self.world, rank=self.powersgd_rank, warm_up_steps=self.powersgd_warm_up_steps
            )

    def needs_warm_up(self) -> bool:
        """Also for PowerSGD, which keeps its state per bucket."""
        return self.compression == "powersgd" or super().needs_warm_up()

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self.warm_up(batches)
        if self.powersgd:
            self.powersgd.begin(step)
        return super().step(step, batches)

    def state(self) -> dict[str, Any]:
        return super().state() | (self.powersgd.state() if self.powersgd else {})

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return super().targets(saved) | (self.powersgd.targets(saved) if self.powersgd else {})

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.powersgd:
            self.powersgd.load(state)


class PowerSgd:
    """torch's PowerSGD hook on `ddp`, with state that can be checkpointed.

    It exchanges each gradient as two low-rank matrices, and adds the approximation error to the next gradient.

    rank: rank of the approximation; the factors of an [n, m] gradient are [n, rank] and [rank, m].
    warm_up_steps: number of the run's first steps, at least 2, that are not compressed.

    Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
    (https://arxiv.org/abs/1905.13727).
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
        # DDP compares a hook's annotations with types, but here they are strings. A lambda has no annotations.
        ddp.register_comm_hook(self.hook_state, lambda state, bucket: self._hook(state, bucket))

    def begin(self, step: int) -> None:
        """Set the global step of the next backward pass."""
        self.hook_state.iter = step

    def state(self) -> dict[str, Any]:
        """This rank's own PowerSGD state; empty before the first compressed step."""
        if not self._buckets:
            return {}
        plain = {f"{self._own}layout": {"rank": self.rank, "buckets": self._buckets}}
        return {
            **plain,
            **{f"{self._own}{kind}/{i}": t for kind, all_ in self._memory.items() for i, t in all_.items()},
        }

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        own = {name: facts for name, facts in saved.items() if name.startswith(self._own)}
        return {name: torch.empty(f.size, dtype=f.dtype, device=self.world.device) for name, f in own.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, if it is present and has the same approximation rank."""
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
        """Reset the state of a bucket whose parameters have changed, since the state is kept per bucket."""
        index, names = bucket.index(), [self._names[parameter] for parameter in bucket.parameters()]
        if self._buckets.get(index) != names:
            self._buckets[index] = names
            for memory in self._memory.values():
                memory.pop(index, None)
