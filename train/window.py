"""Loss and training metrics over the steps since the last `train` line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.trained import SavedTensor, own_prefix
from train.dist.world import World
from train.objectives.measure import means
from train.plan import leaves_of
from train.strategies.base import StepResult

NAME = "loop/window"
LOSS = "loss"
MEASURED = "measured/"


class Window:
    """Sums over samples, added up on the device; read, and begun anew, once a line.

    What stands in it goes into each checkpoint: each rank's own for a resume at the same world size, which adds up in the
    same order, and the sum of all ranks for any other. Sums of one slice stay with the rank that works through it.

    Args:
        slices: `virtual_world_size`, whose sums bear the number of their slice.
        measures: whether steps give metrics, too; their samples are counted apart, as a resume may begin or end that.
    """

    def __init__(self, world: World, *, slices: int | None, measures: bool = False):
        self._world, self._slices, self._measures = world, slices, measures
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Any] = {}
        self._samples, self._measured, self._made = 0, 0, False

    def add(self, result: StepResult, *, samples: int) -> None:
        """Take in a step of so many samples. One that was left out does not count where others were made."""
        if self._made and result.skipped:
            return
        if not self._made and not result.skipped:
            self._begin()
            self._made = True
        self._samples += samples
        self._measured += samples * self._measures
        loss = result.loss.detach().double() * samples  # exact: the loss is of 24 bits
        for name, value in {LOSS: loss, **{f"{MEASURED}{key}": one for key, one in result.metrics.items()}}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def own_loss(self) -> float:
        """This rank's share of the sum of losses. Waits for the device."""
        return float(self._sums.get(LOSS, 0.0))

    def close(self, loss: float) -> tuple[float, dict[str, float]]:
        """The mean loss, of the sum over all ranks, and the means of what was measured; begins anew. Collective."""
        own = {name.removeprefix(MEASURED): float(value) for name, value in self._sums.items() if name != LOSS}
        samples, measured = self._samples, self._measured
        self._begin()
        more = means(self._world.sum_named(own), count=measured) if self._measures else {}
        more.pop(LOSS, None)
        return loss / samples, more

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it. Collective."""
        own = {name: float(value) for name, value in self._sums.items()}
        facts = {"samples": self._samples, "measured": self._measured, "made": self._made}
        shared = {**facts, "sums": self._world.sum_named(own)}
        return {NAME: shared, f"{own_prefix(self._world.rank)}{NAME}": {**facts, "sums": own}}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """None: it is saved as plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave. A checkpoint without it leaves the window empty."""
        own = state.get(f"{own_prefix(self._world.rank)}{NAME}")
        if found := own or state.get(NAME):
            self._samples, self._made = found["samples"], found["made"]
            self._measured = found.get("measured", self._samples if self._measures else 0)
            sums = found["sums"] if own else {name: v for name, v in found["sums"].items() if self._takes(name)}
            self._sums = {
                name: torch.tensor(value, dtype=torch.float64, device=self._world.device)
                for name, value in sums.items()
            }

    def _takes(self, name: str) -> bool:
        """Whether a sum of all ranks is this rank's to go on with."""
        number = name.removeprefix(MEASURED).partition("/")[0]
        if self._slices and number.isdigit():
            return int(number) in leaves_of(self._world.rank, self._world.size, self._slices)
        return self._world.is_first
