"""The weights of a step's micro-batches: what the objective counts in each, over what it counts in the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from muster.code_location import name_of
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.objectives.counted import Labels, count_of, counted, is_known
from muster.world.group import World

OVER_SAMPLES = (
    "the loss of {name} is taken for a mean over samples; if it is one over something else, such as tokens or pixels, give it "
    "a method count(targets) that returns how many there are"
)


class Total:
    """The count of the global batch, asked for once; `within` is a context that measures the wait for it."""

    __slots__ = ("_ask", "_known", "_within")

    def __init__(self, ask: Callable[[], Any], within: Callable[[], AbstractContextManager[None]] = nullcontext):
        self._ask, self._within, self._known = ask, within, None

    def __call__(self) -> Any:
        if self._known is None:
            with self._within():
                self._known = self._ask()
        return self._known


class Counts:
    """What the objective counts in a rank's micro-batches, for their weights in a step.

    Args:
        speaks: whether the counts of this rank's samples are to be added up: others may have the same samples.
        slices: `virtual_world_size`; the slices' counts are then added in their order.
        together: whether all ranks take the step together, so that it has a global batch.
        collates: whether samples may be left out of a batch: then those that are in it are counted.
        within: measures, as a context, how long this rank waits for the others' counts.
    """

    def __init__(
        self,
        objective: Any,
        model: Any,
        *,
        world: World,
        speaks: bool = True,
        slices: int | None = None,
        together: bool = True,
        collates: bool = False,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._objective, self._count = objective, count_of(objective, model)
        self._world, self._speaks, self._slices, self._together = world, speaks, slices or 1, together
        self._within, self._collates = within, collates
        self._waits = world.device.type == "cpu"
        self._ratio: float | None = None
        self._total: Total | None = None
        self._own: Callable[[], Any] | None = None
        self.note = "" if is_known(objective, model) else OVER_SAMPLES.format(name=name_of(objective))
        """What is assumed of an objective that does not say what its mean is over."""

    @property
    def are_plain(self) -> bool:
        """Whether something else than samples is counted, one by one: not with the weights of classes."""
        return self._count is not None and not (isinstance(self._count, Labels) and self._count.weight is not None)

    @property
    def seen(self) -> tuple[Any, Any] | None:
        """Of the last step: what turns this rank's share of the loss into a sum over what is counted, and this rank's part of the
        number of that; None if it is the samples."""
        if self._total is None:
            return None
        whole = self._total()
        return whole, self._own() if self._own else whole * self._world.is_first

    def weigh(self, batches: Sequence[Batch], *, alone: bool = False) -> list[Batch]:
        """Return the micro-batches of a step with what is counted in them. Collective, unless `alone`: within this rank's samples.

        Raises ConfigError: the ranks take no step together, and the number per sample is not always the same.
        """
        if self._count is None and not self._collates:
            return list(batches)
        own = [self._of(batch) if batch.count else 0.0 for batch in batches]
        if not self._together:
            self._refuse_unlike(batches, own)
            return list(batches)
        if alone:
            mine, share = sum(own), sum(batch.part for batch in batches)
            whole = mine / share if share else 0.0
            self._total, self._own = Total(lambda: whole), lambda: mine
        else:
            self._total, self._own = Total(self._later(batches, own), self._within), None
        total = self._total
        return [replace(each, own=mine, of=total) for each, mine in zip(batches, own, strict=True)]

    def _of(self, batch: Batch) -> Any:
        if self._count is None:
            return float(batch.count)
        return counted(
            self._count, batch.inputs, batch.targets, batch.count, objective=self._objective, waits=self._waits
        )

    def _later(self, batches: Sequence[Batch], own: list[Any]) -> Callable[[], Any]:
        """Return what gives the count of the global batch, for which the other ranks need only have begun the step. Collective."""
        rows: Any = [0.0] * self._slices
        if not self._waits:
            rows = torch.zeros(self._slices, dtype=torch.float64, device=self._world.device)
        for batch, count in zip(batches, own, strict=True) if self._speaks else ():
            at = batch.slice if self._slices > 1 else 0
            rows[at] = rows[at] + count
        if self._waits:
            later = self._world.sum_later(rows)
            return lambda: sum(later())
        if self._world.size == 1:
            return lambda: rows.sum()
        work: Any = dist.all_reduce(rows, async_op=True)

        def later_on_device() -> Any:
            work.wait()
            return rows.sum()

        return later_on_device

    def _refuse_unlike(self, batches: Sequence[Batch], own: list[Any]) -> None:
        for batch, count in zip(batches, own, strict=True):
            if batch.count:
                ratio = float(count) / batch.count
                self._ratio = ratio if self._ratio is None else self._ratio
                if ratio != self._ratio:
                    raise ConfigError(
                        f"{name_of(self._objective)} takes its mean over {float(count):g} of {batch.count} samples, and over "
                        f"{self._ratio:g} a sample before: updates of single ranks have no global batch to take it over; let "
                        "all ranks update together, or use an objective whose mean is over samples"
                    )
