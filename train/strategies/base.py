"""The seam between the loop, which knows no strategy, and the strategies.

What it has to carry: DDP (replicas that agree after every step), local SGD (replicas that differ between averagings:
`rank_state`, `agree`), FSDP (`build` makes the model, shards it, and only then the optimizer; `state` gathers),
pipelines (`shard` is shared by the stages of one pipeline; the loss lives on the last, `StepResult.loss` is 0
elsewhere), and parameter servers (a rank with `shard` None gets no samples: its `step` serves).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from train.config.keys import NonFinite, Precision
from train.data.loader import Batch
from train.dist.world import World


@dataclass(frozen=True)
class Recipe:
    """All that a strategy needs to build and to run a training step."""

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    objective: Any
    schedule: Callable[[int], float]
    precision: Precision
    grad_clip: float | None
    compile: bool
    channels_last: bool | None
    on_nonfinite: NonFinite


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    loss: [] this rank's share of the global batch's mean loss; the shares of all ranks add up to it.
    grad_norm: [] the L2 norm of the global gradient before clipping, the same on every rank.
    skipped: the gradient was not finite, and the step left no trace.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: bool = False


class Strategy(ABC):
    """Carries out the training of one model across `world`. Built from its config group plus `world`."""

    world: World
    lr: float = 0.0
    """The learning rate of the last step, of the first parameter group."""

    @property
    def shard(self) -> tuple[int, int] | None:
        """(index, number) of this rank's slice of every global batch; None for a rank that trains on no samples."""
        return self.world.rank, self.world.size

    @abstractmethod
    def build(self, recipe: Recipe) -> None:
        """Make the model, lay it out over the ranks, then make the optimizer. Collective."""

    @abstractmethod
    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step on this rank's micro-batches of global step `step`. Collective."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Metrics of one micro-batch, summed over its samples. Called equally often on every rank."""

    @abstractmethod
    def agree(self) -> None:
        """Make the ranks' parameters equal, where the strategy lets them differ between steps. Collective."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resume at any world size needs, complete on rank 0, of tensors and plain values. Collective."""

    @abstractmethod
    def rank_state(self) -> dict[str, Any]:
        """What an exact resume at the same world size needs of this rank alone."""

    @abstractmethod
    def load(self, state: dict[str, Any], rank_state: dict[str, Any] | None) -> None:
        """Take up a saved state; `rank_state` is None if the world size has changed. Collective."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The finished model's unwrapped state dict, complete on rank 0. Collective."""
