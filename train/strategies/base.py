"""The seam between the loop, which knows no strategy, and the strategies.

A strategy is built from its config group alone and says, before any process group exists, what it cannot do. Then it
builds the model, lays it out over the ranks and makes the optimizer; it carries out one optimizer step on this rank's
micro-batches and measures a micro-batch of evaluation. Its state is flat: names that every rank spells
alike (`model/<parameter>`, `optimizer/<parameter>/<value>`, `optimizer/groups`, `scaler`,
`buffers/<name>` of what no state dict has), each with what this rank
owns or replicates of it, and names that begin with
`own_prefix`, which are this rank's alone. Who writes what, and how a layout
is read by another, is the checkpoint's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from train.checkpoint.trained import SavedTensor
from train.config.keys import Config, NonFinite, Precision
from train.data.loader import Batch
from train.dist.layout import DATA, Layout
from train.dist.world import World
from train.errors import ConfigError
from train.objectives.measure import Measures
from train.strategies.honours import honoured

BuildOptimizer = Callable[..., torch.optim.Optimizer]
"""(pairs of name and parameter, elsewhere=names that only other ranks have) -> optimizer"""


@dataclass(frozen=True)
class Recipe:
    """All that a strategy needs to build and to run a training step.

    seed, slices: with `slices`, what `virtual_world_size` asks for; see slices.py.
    measures: to be updated with what an evaluation gives. train_metrics: whether a step measures, too.
    optimizer_options: the keys that the config sets; in a parameter group they beat what a checkpoint holds.
    """

    build_model: Callable[[], nn.Module]
    build_optimizer: BuildOptimizer
    objective: Any
    schedule: Callable[[int], float]
    precision: Precision
    grad_clip: float | None
    compile: bool
    channels_last: bool | None
    on_nonfinite: NonFinite
    seed: int = 0
    slices: int | None = None
    optimizer_options: frozenset[str] = frozenset()
    measures: Measures = field(default_factory=lambda: Measures({}))
    train_metrics: bool = False


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    loss: [] this rank's share of the global batch's mean loss; the shares of all ranks add up to it.
    norm: [] the L2 norm of the global gradient before clipping, the same on every rank; or what finds it until the next
        step begins, where nobody needed to know it. Collective.
    skipped: the gradient was not finite, and the step left no trace.
    metrics: this rank's sums of the objective's metrics, where the recipe asks for them.
    """

    loss: Tensor
    norm: Tensor | Callable[[], Tensor]
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def grad_norm(self) -> Tensor:
        return self.norm() if callable(self.norm) else self.norm


class Strategy(ABC):
    """Carries out the training of one model across `world`, which it has from `build` on."""

    world: World
    honours: ClassVar[Collection[str]] = frozenset()
    """The keys of the config, of those in honours.MADE_BY, that it honours; any other that is given is refused."""

    @property
    def caveat(self) -> str:
        """What the kit promises and this strategy, as it is configured, does not keep, in a line; none if empty."""
        return ""

    def layout(self, world_size: int) -> Layout:
        """Which rank is which part of what. Raises ConfigError for a world size that does not fit."""
        return Layout({DATA: world_size})

    def check(self, config: Config, world_size: int) -> None:
        """Before any process group. Raises ConfigError for what does not go together, with what does."""
        self.layout(world_size)

    @property
    def data_shard(self) -> tuple[int, int] | None:
        """(index, number) of this rank's slice of every global batch; None for a rank that trains on no samples."""
        return self.layout(self.world.size).shard(self.world.rank)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained by the names of the state, as this rank has it, equal on all ranks that have it.

        Raises:
            ConfigError: there are none whose values all ranks agree on after every step.
        """
        raise ConfigError(f"strategy={type(self).__name__}: its parameters are not there for callbacks to read")

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the last step, of the first parameter group."""

    @abstractmethod
    def build(self, recipe: Recipe, world: World) -> None:
        """Make the model, lay it out over the ranks of `world`, then make the optimizer. Collective."""

    @abstractmethod
    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One optimizer step on this rank's micro-batches of global step `step`. Collective."""

    def waited_s(self) -> float:
        """Seconds that this rank has waited for the gradients of others since it was last asked; 0 if that is not known.

        The steps up to now have to be done.
        """
        return 0.0

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Metrics of one micro-batch, summed over its samples, of the model as it would be saved. Collective."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether the parameters are; the same on every rank. Waits for the device. Collective."""

    @abstractmethod
    def sync_parameters(self) -> None:
        """Make the ranks' parameters equal, where the strategy lets them differ between steps. Collective."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resume needs: tensors, DTensors and plain values by name, as far as this rank has them. Collective."""

    @abstractmethod
    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """What to read the `saved` tensors into, in this rank's layout; what is left out is not read. Collective.

        Raises:
            ConfigError: they are not those of this model.
        """

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state: `targets` filled, and plain values. Own names are there at the same world size only.

        Collective.

        Raises:
            ConfigError: it does not fit this model and optimizer.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        """The finished model's state dict by unwrapped names, the same ones in the same order on every rank. Collective.

        What lies in pieces is a DTensor, or a function that makes it whole on rank 0 at least; that is collective, too.
        A module's extra state is a plain value.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of what `build` has started, when all ranks have come to a good end. Collective."""


def check_slices(config: Config, strategy: Strategy, world_size: int) -> None:
    """Raises ConfigError where a step cannot be computed as `virtual_world_size` ranks would."""
    if not (slices := config.virtual_world_size):
        return
    said = f"virtual_world_size={slices}"
    if "virtual_world_size" not in honoured(type(strategy)):
        raise ConfigError(f"{said} is for strategy=ddp and strategy=single: give one of them, or leave it out")
    if slices < world_size:
        raise ConfigError(f"{said} is less than the world size {world_size}: give {world_size} or more, or start fewer")
    if config.compile:
        raise ConfigError(
            f"{said} and compile=true: compiled code differs with the order of shapes seen; leave one out"
        )
