"""An exact evaluation: every sample once, at any world size, with the random numbers of training left as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

    The generators are seeded for each micro-batch from `seed` and the position of its first sample.
    batches: this rank's micro-batches of each step. measure: a micro-batch -> sums by name, numbers or tensors [] in float64.
    begin: called before each step and before the sums over the ranks; False stops there.
    """
    totals = dict[str, Any]()
    with kept_generators(on_device=True):
        for of_step in batches:
            if not begin():
                return None
            for batch in of_step:
                seed_generators(key_of(seed, "evaluation", batch.first), on_device=True)
                for name, value in measure(batch).items():
                    totals[name] = totals[name] + value if name in totals else value
    give_memory_back()
    if not begin():
        return None
    return world.sum_named({name: float(total) for name, total in totals.items()})
