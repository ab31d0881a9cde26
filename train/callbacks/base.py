"""The seam between the loop and what users hang on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from train.checkpoint.trained import SavedTensor
from train.strategies.base import Strategy

if TYPE_CHECKING:
    from train.loop import Run


class Callback:
    """Called on every rank alike, in the order of the config, in reverse at the end of an evaluation; what it raises ends
    the run. All may be collective.

    It reads `run.step`, `run.progress`, `run.config`, `run.world` and `run.strategy.parameters()`, and ends training
    early with `run.stop(reason)`. Whatever it has to remember for a resume is its `state`.

    needs_evaluations: whether it does nothing without them; a run that makes none is then refused.
    averages: whether evaluation uses the tensors of its `state` in place of the parameters of the same names; `train.evaluate`
        and `init_from` then take them from a checkpoint, too.
    """

    needs_evaluations = False
    averages: ClassVar[bool] = False

    def on_build(self, strategy: Strategy) -> None:
        """The model is there, and nothing has been restored yet."""

    def on_start(self, run: Run) -> None:
        """All is restored, and training begins: also where a callback that the checkpoint knows nothing of begins."""

    def on_step_end(self, run: Run) -> None:
        """A step is done. Called after every step: on CUDA it must not wait for the device."""

    def on_trial(self, values: dict[str, float]) -> None:
        """Before the first step some batches were evaluated, without a trace, with such values: to be looked at only."""

    def on_eval_begin(self, run: Run) -> None:
        """An evaluation begins."""

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        """It has ended, and these are its values, the same on every rank."""

    def on_checkpoint(self, run: Run) -> None:
        """A checkpoint is about to be taken; perhaps in the middle of an evaluation that is being given up."""

    def on_end(self, run: Run) -> None:
        """Training is over, `model.pt` is about to be written."""

    def close(self) -> None:
        """The attempt ends, however."""

    def state(self) -> dict[str, Any]:
        """What a resume needs by names of its own: tensors like the parameters' (DTensors too), and plain values."""
        return {}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """What to read the `saved` tensors into, in this rank's layout."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Not called where the checkpoint has none of it: then `on_start` begins from what was
        restored, never from what `on_build` saw."""
