"""The interface between the training loop and the strategies; the loop knows only this interface.

A strategy is built from its config group alone and rejects unsupported options before a process group exists.

The state is a flat dict. Shared names are the same on every rank: `model/<parameter>`, `optimizer/<parameter>/<value>`,
`optimizer/groups`, `scaler`, and `buffers/<name>` for buffers in no state dict. Each rank holds the part that it owns
or replicates. Names that begin with `own_prefix` belong to one rank alone. The checkpoint decides which rank writes
which part and how a different layout reads it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from muster.checkpoint.trained import SavedTensor
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.keys import Config, Device, Hierarchical, NonFinite, Precision
from muster.train.objectives.measure import Measures
from muster.train.strategies.step.counts import Counts
from muster.train.strategies.supported_keys import honoured
from muster.world.group import World
from muster.world.layout import DATA, Layout

BuildOptimizer = Callable[..., torch.optim.Optimizer]
"""(pairs of name and parameter, elsewhere=names of parameters that only other ranks hold) -> optimizer"""


@dataclass(frozen=True)
class Recipe:
    """Everything that a strategy needs to build and run a training step.

    slices: the config's `virtual_world_size`, see virtual_ranks.py. seed: seeds the generators of each slice.
    measures: metrics that `evaluate` updates. train_metrics: whether training steps compute metrics, too.
    optimizer_options: the option keys that the config sets; in a parameter group they override the checkpoint's values.
    collates: whether a function of the user's makes batches, which may leave samples out.
    in_evaluation: names of the frozen modules that stay in evaluation mode, once the model is built.
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
    collates: bool = False
    in_evaluation: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    loss: [] this rank's share of the global batch's mean loss; the shares of all ranks sum to the mean.
    norm: [] L2 norm of the global gradient before clipping, the same on every rank; of a step that a rank takes alone, of its own.
        If the step itself did not need the norm, a function that computes it, valid until the next step begins. Collective.
    skipped: True if an update was left out, because a gradient or an average of parameters was not finite.
    metrics: this rank's sums of the objective's metrics, if the recipe sets `train_metrics`.
    """

    loss: Tensor
    norm: Tensor | Callable[[], Tensor]
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def grad_norm(self) -> Tensor:
        """[] L2 norm of the global gradient before clipping. Collective if `norm` is a function."""
        return self.norm() if callable(self.norm) else self.norm


class Strategy(ABC):
    """Trains one model across `world`, which is set by `build`."""

    world: World
    honours: ClassVar[Collection[str]] = frozenset()
    """The keys of supported_keys.MADE_BY that this strategy supports; setting any other of them is a ConfigError."""

    @property
    def caveat(self) -> str:
        """One line that names the guarantee of the kit that this configured strategy does not give; empty if none."""
        return ""

    def layout(self, world_size: int) -> Layout:
        """The grid of ranks for a world size. Raises ConfigError for a world size that does not fit."""
        return Layout({DATA: world_size})

    def check(self, config: Config, world_size: int) -> None:
        """Validate the config before a process group exists. Raises ConfigError, which says which values are valid."""
        self.layout(world_size)

    @property
    def data_shard(self) -> tuple[int, int] | None:
        """(index, number of shards) of this rank's part of every global batch; None if it trains on no samples."""
        return self.layout(self.world.size).shard(self.world.rank)

    def divides(self, world_size: int) -> int:
        """The number of parts into which a batch is divided, beside micro-batches."""
        return self.layout(world_size).shard(0)[1]

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of those that have its samples."""
        return self.layout(self.world.size).speaks(self.world.rank)

    @property
    def is_together(self) -> bool:
        """Whether all ranks take each step together; known after `build`."""
        return True

    def counts(self, recipe: Recipe) -> Counts:
        """Return what is counted in micro-batches, for their weights in the loss of a step, after `build`."""
        model = getattr(self, "model", None) or getattr(getattr(self, "optimizer_step", None), "model", None)
        how: Any = {"world": self.world, "speaks": self.speaks, "slices": recipe.slices, "together": self.is_together}
        how |= {"collates": recipe.collates}
        return Counts(self.loss_by(recipe), model, within=self.waiting, **how)

    def loss_by(self, recipe: Recipe) -> Any:
        """Return what computes the loss of training, after `build`, and may have a method `count(targets)`."""
        return recipe.objective

    def is_alone(self, step: int) -> bool:
        """Whether this rank takes the step by its own samples alone."""
        return False

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by their names in the state: the same values on all ranks that hold them.

        Raises ConfigError: the strategy does not keep the parameters equal across ranks after every step.
        """
        raise ConfigError(
            f"strategy={type(self).__name__}: it does not give callbacks access to its parameters, which its ranks do not hold "
            "alike after every step: leave out callbacks that read them, such as ema, or train with ddp, zero or fsdp"
        )

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last step."""

    @abstractmethod
    def build(self, recipe: Recipe, world: World) -> None:
        """Build the model, distribute it over the ranks of `world`, then build the optimizer. Collective."""

    @abstractmethod
    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """Run one optimizer step on this rank's micro-batches of global step `step`. Collective."""

    def waited_s(self) -> float:
        """Exposed communication time in seconds since the last call: this rank's wait for other ranks' gradients; 0 if not measured.

        All steps so far must have finished on the device.
        """
        return 0.0

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Count the time in this context, within a step, as a wait for other ranks; a hook."""
        return contextlib.nullcontext()

    def gradients_computed(self) -> int:
        """Steps whose own gradients this rank's device has computed, without waiting for it; 0 if that is unknown.

        Any thread may call it. It tells a device that hangs from those that wait for it.
        """
        return 0

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Metrics of one micro-batch, summed over its samples, for the model as it would be saved. Collective."""

    def has_diverged(self) -> bool:
        """True if an update was left out, or not finite, that no `StepResult` tells of; the same on every rank. Collective."""
        return False

    @abstractmethod
    def finite(self) -> Collection[str]:
        """Names of entries of `state`, such as those of parameters, that must be finite for a checkpoint to be committed.

        They are compared in the copy that is written, beside training, which does not wait for it.
        """

    @abstractmethod
    def sync_parameters(self) -> None:
        """Make the parameters equal on all ranks, if the strategy lets them differ between steps. Collective."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state for a resume: this rank's tensors, DTensors and plain values by name. Collective."""

    @abstractmethod
    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Tensors in this rank's layout to read the `saved` ones into; names left out are not read. Collective.

        Raises ConfigError: the saved tensors do not match this model.
        """

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state: the filled `targets` and the plain values. Collective.

        Names with `own_prefix` are present only at the world size that saved them.
        Raises ConfigError: the state does not fit this model and optimizer.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        """The finished model's state dict, with unwrapped names in the same order on every rank. Collective.

        A sharded entry is a DTensor, or a function that returns the full tensor on rank 0 at least; calling the
        function is collective, too. A module's extra state is a plain value.
        """

    def close(self) -> None:  # noqa: B027
        """Release what `build` started, after all ranks have finished without an error. Collective."""


def check_slices(config: Config, strategy: Strategy, world_size: int) -> None:
    """Raise ConfigError if a step cannot be computed as on `virtual_world_size` ranks."""
    if not (slices := config.virtual_world_size):
        if config.dist.hierarchical is Hierarchical.always:
            raise ConfigError(
                "dist.hierarchical=always is of virtual_world_size alone: other sums are gloo's ring, which crosses the "
                "network once per host; leave it out"
            )
        return
    said = f"virtual_world_size={slices}"
    if "virtual_world_size" not in honoured(type(strategy)):
        kind = type(strategy)
        is_own = not kind.__module__.startswith("muster.")
        own = (
            f"; if {kind.__name__} only calls super()'s methods, declare honours = Ddp.honours in it" if is_own else ""
        )
        raise ConfigError(f"{said} requires strategy=ddp or strategy=single: use one of them, or leave it out{own}")
    if config.device is not Device.cpu and torch.cuda.is_available() and not config.deterministic:
        raise ConfigError(
            f"{said} on GPUs requires deterministic=true: other kernels add up in any order; or device=cpu"
        )
    if slices < world_size:
        raise ConfigError(f"{said} is less than the world size {world_size}: give {world_size} or more, or start fewer")
    if config.compile:
        raise ConfigError(
            f"{said} and compile=true: compiled code differs with the order of shapes seen; leave one out"
        )
