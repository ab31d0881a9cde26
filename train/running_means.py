"""Loss and training metrics over the steps since the last `train` line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.loggers.metrics import check_names
from muster.sample_plan import leaves_of
from muster.train.objectives.measure import means_of_slices
from muster.train.strategies.base import StepResult
from muster.train.throughput.figures import OF_LINES
from muster.world.group import World

NAME = "loop/window"
LOSS, LOSS_OF = "loss", "loss/of"
MEASURED = "measured/"


class Window:
    """Sums of loss and metrics over samples, accumulated on the device; read and reset once per log line.

    Each checkpoint contains the sums: each rank's own, for a resume at the same world size that adds in the same
    order, and the sum over all ranks, for other world sizes. A slice's sums stay with the rank that computes the slice.

    Args:
        world: the ranks of this attempt.
        slices: `virtual_world_size`; each sum's name then contains the number of its slice.
        measures: True if steps return metrics. Their samples are counted separately, as a resume may turn them on or
            off.
    """

    def __init__(self, world: World, *, slices: int | None, measures: bool = False):
        self._world, self._slices, self._measures = world, slices, measures
        self.logged: dict[str, Any] = {}
        """What callbacks have logged for the next line: numbers, or tensors [] on any device."""
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Any] = {}
        self._samples, self._measured, self._made = 0, 0, False

    def add(self, result: StepResult, *, samples: int, seen: tuple[Any, Any] | None = None) -> None:
        """Add the result of a step of `samples` samples. Skipped steps count only if all so far were skipped.

        seen: what makes a sum of this rank's share of the loss, and this rank's part of what the mean is over
            (`Counts.seen`); None: the samples.
        """
        if self._made and result.skipped:
            return
        if not self._made and not result.skipped:
            self._begin()
            self._made = True
        self._samples += samples
        self._measured += samples * self._measures
        waits = self._world.device.type == "cuda"
        times, of = seen or (samples, samples * self._world.is_first)
        # exact in float64: a float32 loss has 24 bits
        loss = (result.loss.detach().double() if waits else result.loss.item()) * times
        self._sums[LOSS] = self._sums[LOSS] + loss if LOSS in self._sums else loss
        self._sums[LOSS_OF] = self._sums[LOSS_OF] + of if LOSS_OF in self._sums else of
        for key, value in result.metrics.items():
            name = f"{MEASURED}{key}"
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    @property
    def samples(self) -> int:
        """The samples of all ranks that the sums are of."""
        return self._samples

    def clear(self) -> None:
        """Forget the sums and the logged values, which a log line has."""
        self._begin()
        self.logged = {}

    def own_loss(self) -> list[float]:
        """Return this rank's part of the sum of losses, and of what their mean is over. Waits for the device."""
        return [float(self._sums.get(name, 0.0)) for name in (LOSS, LOSS_OF)]

    def close(self, loss: float, of: float) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the mean metrics, and reset. Collective.

        loss, of: sum of losses over all ranks, and of what their mean is over.
        """
        own = {k.removeprefix(MEASURED): float(v) for k, v in self._sums.items() if k.startswith(MEASURED)}
        measured = self._measured
        self._begin()
        more = means_of_slices(self._world.sum_named(own), count=measured) if self._measures else {}
        more.pop(LOSS, None)
        check_names(more, "a metric", taken=OF_LINES)
        return loss / of if of else 0.0, more

    def take_logged(self) -> dict[str, float]:
        """Return what callbacks have logged, and forget it. Waits for the device."""
        logged, self.logged = {name: float(value) for name, value in self.logged.items()}, {}
        return logged

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Collective."""
        own = self.own()
        shared = {**own, "sums": self._world.sum_named(own["sums"])}
        return {NAME: shared, f"{own_prefix(self._world.rank)}{NAME}": own}

    def own(self) -> dict[str, Any]:
        """Return this rank's sums, as JSON values, for `load_own`. Waits for the device."""
        sums = {name: float(value) for name, value in self._sums.items()}
        logged = {name: float(value) for name, value in self.logged.items()}
        made = {"samples": self._samples, "measured": self._measured, "made": self._made, "sums": sums}
        return {**made, "logged": logged} if logged else made

    def logged_alone(self) -> dict[str, Any]:
        """Return the state of a checkpoint that one rank writes alone: what was logged, without sums, which all ranks have."""
        return {NAME: {"samples": 0, "measured": 0, "made": False, "sums": {}, "logged": self.own().get("logged", {})}}

    def load_own(self, found: Mapping[str, Any]) -> None:
        """Restore this rank's sums."""
        self.load({f"{own_prefix(self._world.rank)}{NAME}": found})

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return no tensors to read into: the state is plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state. A checkpoint without one leaves the window empty."""
        own = state.get(f"{own_prefix(self._world.rank)}{NAME}")
        if found := own or state.get(NAME):
            self._samples, self._made = found["samples"], found["made"]
            self._measured = found.get("measured", self._samples if self._measures else 0)
            self.logged = dict(found.get("logged", {}))
            sums = found["sums"] if own else {name: v for name, v in found["sums"].items() if self._takes(name)}
            if LOSS_OF not in found["sums"]:  # of a run before losses had counts of their own
                sums = {**sums, LOSS_OF: self._samples * self._world.is_first}
            self._sums = {
                name: torch.tensor(value, dtype=torch.float64, device=self._world.device)
                for name, value in sums.items()
            }

    def _takes(self, name: str) -> bool:
        """Return True if this rank continues a sum over all ranks: with slices the slice's rank, else rank 0."""
        number = name.removeprefix(MEASURED).partition("/")[0]
        if self._slices and number.isdigit():
            return int(number) in leaves_of(self._world.rank, self._world.size, self._slices)
        return self._world.is_first
