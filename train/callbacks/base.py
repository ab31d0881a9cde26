"""The interface between the training loop and a user's callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from muster.checkpoint.trained import SavedTensor
from muster.train.strategies.base import Strategy

if TYPE_CHECKING:
    from muster.train.loop import Run


class Callback:
    """Base class of callbacks. Every method may be collective.

    Methods are called on every rank, in the order of the config; `on_eval_end` and `on_checkpoint` in reverse order. An
    exception ends the run.

    A callback may read `run.step`, `run.progress`, `run.config`, `run.world`, `run.model` (as the strategy holds it) and
    `run.strategy.parameters()`. It adds values to the next `train` line with `run.log(name=value)` and ends training early
    with `run.stop(reason)`. Its `state` holds the values that it needs on resume.

    needs_evaluations: True if the callback does nothing without evaluations; a run without them is then refused.
    averages: True if evaluation uses the tensors of its `state` in place of the parameters of the same names;
        `muster.train.evaluate` and `init_from` then read them from a checkpoint, too.
    """

    needs_evaluations = False
    averages: ClassVar[bool] = False

    def on_build(self, strategy: Strategy) -> None:
        """Called when the model is built, before anything is restored."""

    def on_start(self, run: Run) -> None:
        """Called after the restore, before training, also if the checkpoint has no state of this callback."""

    def on_step_end(self, run: Run) -> None:
        """Called after every step. On CUDA it must not synchronize with the device."""

    def on_trial(self, values: dict[str, float]) -> None:
        """Called before the first step with the values of a trial evaluation without a trace; for checks only."""

    def on_eval_begin(self, run: Run) -> None:
        """Called before an evaluation."""

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        """Called after an evaluation with its values, which are the same on every rank.

        `run.is_evaluated_again`: the restored state, if there is one, has counted it, in another run.
        """

    def on_checkpoint(self, run: Run) -> None:
        """Called before a checkpoint is taken, possibly during an evaluation that is being aborted."""

    def on_end(self, run: Run) -> None:
        """Called after training, before `model.pt` is written."""

    def close(self) -> None:
        """Called when the attempt ends, for any reason."""

    def state(self) -> dict[str, Any]:
        """Return by name the values for a resume: tensors like the parameters (DTensors too) and plain values."""
        return {}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return the tensors to read the `saved` tensors into, in this rank's layout."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` from a checkpoint.

        Not called if the checkpoint has no state of this callback: then `on_start` initializes it from the restored
        model, never from the one that `on_build` saw.
        """
