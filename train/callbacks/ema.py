"""Exponential moving average of the weights, which evaluation uses and the final `model.pt` holds.

Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; in its exponential form
Tarvainen and Valpola, "Mean teachers are better role models", 2017. The warm-up of its decay:
https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage (`num_updates`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from muster.checkpoint.trained import SavedTensor
from muster.errors import ConfigError
from muster.train.callbacks.base import Callback
from muster.train.config.constraints import Ge
from muster.train.strategies.base import Strategy
from muster.world.dtensor import own_piece

if TYPE_CHECKING:
    from muster.train.loop import Run


UPDATES = ".updates"
"""Key of the update count in the state, beside the averages; no parameter's name begins with a dot."""
BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
NOT_AVERAGED = (
    "ema averages parameters alone: batch norm's statistics are those of the weights themselves, and evaluations and model.pt are worse until "
    "the weights hardly change within the average; a lower learning rate at the end or a smaller callbacks.ema.decay helps"
)


class Ema(Callback):
    """Updates `average = decay * average + (1 - decay) * weights` every `every_steps` steps; buffers are not averaged.

    Training continues with the weights themselves. Checkpoints hold both the weights and the average.

    warmup: if True, the decay is min(decay, (1 + n) / (10 + n)) after n updates, so that a short run averages trained
        weights rather than its initial weights.
    """

    averages = True

    def __init__(self, *, decay: float, every_steps: Annotated[int, Ge(1)], warmup: bool = False):
        if not 0 < decay < 1:
            raise ConfigError(f"callbacks.ema.decay={decay} is out of range: use a value between 0 and 1")
        self.decay, self.every_steps, self.warmup = decay, every_steps, warmup
        self._updates: int | None = 0
        self._in_use = False
        self._restored: set[str] = set()

    def on_build(self, strategy: Strategy) -> None:
        self._weights = {name: p for name, p in strategy.parameters().items() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._weights.items()}

    def on_start(self, run: Run) -> None:
        """Copy the weights, now restored and equal on all ranks, into each average that no checkpoint had."""
        if not self._restored and any(isinstance(each, BATCH_NORM) for each in run.model.modules()):
            run.records.event("note", text=NOT_AVERAGED)
        for average, weight in self._pairs(without=self._restored):
            average.copy_(weight)

    def on_step_end(self, run: Run) -> None:
        if run.step % self.every_steps == 0:
            averages, weights = (list(side) for side in zip(*self._pairs(), strict=True))
            torch._foreach_lerp_(averages, weights, 1 - self._next_decay())
            self._updates = None if self._updates is None else self._updates + 1

    def on_eval_begin(self, run: Run) -> None:
        self._use(True)

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        self._use(False)

    def on_checkpoint(self, run: Run) -> None:
        self._use(False)

    def on_end(self, run: Run) -> None:
        self._use(True)

    def state(self) -> dict[str, Any]:
        return {**self._average, **({} if self._updates is None else {UPDATES: self._updates})}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return {name: average for name, average in self._average.items() if name in saved}

    def load(self, state: dict[str, Any]) -> None:
        """The averages are read in place. Without a saved update count there is no warm-up."""
        self._restored, self._updates = {*state} - {UPDATES}, state.get(UPDATES)

    def _next_decay(self) -> float:
        if not self.warmup or self._updates is None:
            return self.decay
        return min(self.decay, (1 + self._updates) / (10 + self._updates))

    def _use(self, wanted: bool) -> None:
        """Swap the model's weights and the averages, unless they already are as `wanted`."""
        if wanted != self._in_use:
            self._in_use = wanted
            for average, weight in self._pairs():
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)

    def _pairs(self, *, without: Collection[str] = ()) -> list[tuple[Tensor, Tensor]]:
        """Return (average, weight) pairs, of each the piece that this rank holds."""
        named = [(name, weight) for name, weight in self._weights.items() if name not in without]
        return [(_own(self._average[name]), _own(weight)) for name, weight in named]


def _own(tensor: Tensor) -> Tensor:
    return own_piece(tensor.detach())
