"""DistributedDataParallel, with optional compression of the gradients that are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.trained import SavedTensor
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import Ge
from muster.train.config.keys import Config, NonFinite, Precision
from muster.train.strategies.base import StepResult
from muster.train.strategies.replicas.powersgd import PowerSgd
from muster.train.strategies.replicas.replicated import ConfiguredReplicas

HALVES = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


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
