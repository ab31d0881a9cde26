"""An exact evaluation: every sample once, at any world size, with the random numbers of training left as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from muster.data.generators import kept_generators, key_of, seed_generators
from muster.data.loader import Batch
from muster.process import give_memory_back
from muster.world.group import World


def sums_over(
    batches: Iterable[list[Batch]],
    measure: Callable[[Batch], Mapping[str, Any]],
    *,
    world: World,
    seed: int,
    begin: Callable[[], bool],
) -> dict[str, float] | None:
    """Return the sums of `measure` over `batches` and the ranks; None if the ranks stopped before the end. Collective.

    The generators are seeded for each micro-batch from `seed` and its position.
    batches: this rank's micro-batches of each step. measure: a micro-batch -> sums by name, numbers or tensors [] in float64.
    begin: called before each step and before the sums over the ranks; False stops there.
    """
    totals = dict[str, Any]()
    with kept_generators(on_device=True):
        for number, of_step in enumerate(batches):
            if not begin():
                return None
            for of_slice, parts in groupby(of_step, key=lambda batch: batch.slice):
                for part, batch in enumerate(parts):
                    seed_generators(key_of(seed, number, "evaluation", of_slice, part), on_device=True)
                    for name, value in measure(batch).items():
                        totals[name] = totals[name] + value if name in totals else value
    give_memory_back()
    if not begin():
        return None
    return world.sum_named({name: float(total) for name, total in totals.items()})
