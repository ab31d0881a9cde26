"""An exact evaluation for a loop of a user's own: every sample once, at any world size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from muster.attempt.evaluation import sums_over
from muster.code_location import described
from muster.data.loader import Batch, LoaderConfig, batches
from muster.errors import ConfigError
from muster.job.batch_source import at_least_one, is_loader, with_length
from muster.job.replicas import digest_of, of_rank_0
from muster.loggers.metrics import check_names
from muster.sample_plan import Dealt, Plan
from muster.world.counts import OF, SEEN, means, unpaired
from muster.world.dtensor import in_pieces
from muster.world.group import World

Measure = Callable[[Any], Mapping[str, Tensor | tuple[Tensor, Tensor]]]
"""A batch -> name -> one value per sample, [B], or a pair of them: the sums of each sample, and what their mean is over."""


def evaluate(
    dataset: Any,
    measure: Measure,
    *,
    batch_size: int,
    world: World,
    modules: Iterable[nn.Module],
    loader: LoaderConfig,
    begin: Callable[[], bool],
) -> dict[str, float] | None:
    """Return the means of `measure` over `dataset`; None if the ranks agreed to stop before the end. Collective.

    See `Job.evaluate`. loader: how samples are fetched. begin: called before each rank's next batch and before the sums; False stops there.
    Raises ConfigError: `measure` returns something else than tensors [B] by name, or pairs of them, or `dataset` has no samples.
    """
    at_least_one("evaluate", batch_size=batch_size)
    if is_loader(dataset):
        raise ConfigError(
            f"evaluate({type(dataset).__name__}) takes a data set, which it divides itself among the ranks: write "
            "evaluate(loader.dataset, ..., batch_size=...), and num_workers and collate_fn if the loader has them"
        )
    dataset = with_length(dataset, "evaluate")
    plan = Plan(len(dataset), world.size * batch_size, shuffle=False)
    loader = replace(loader, share=Dealt(world.rank, world.size, size=batch_size))
    modules, taken = [*modules], batches(dataset, plan, range(plan.steps_per_epoch), loader)

    def sums_of(batch: Batch) -> dict[str, Any]:
        found = _checked(measure(batch.inputs), size=max(1, batch.count))
        # a rank without samples gets one that does not count
        sums = {name: values[: batch.count].double().sum() for name, values in found.items()}
        return {SEEN: batch.count} | sums

    with torch.no_grad(), evaluating(modules), as_saved(modules, world):
        sums = sums_over(taken, sums_of, world=world, seed=loader.seed, begin=begin)
    return None if sums is None else means(sums)


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put `modules` into evaluation mode; on exit, put each of their parts back into its own mode."""
    parts = [part for module in modules for part in module.modules()]
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, mode in zip(parts, before, strict=True):
            part.training = mode


@contextlib.contextmanager
def as_saved(modules: Iterable[nn.Module], world: World) -> Iterator[None]:
    """Give all ranks rank 0's buffers, those of model.pt, where they differ; on exit, restore each rank's own. Collective.

    After a step, the batch-norm statistics of the ranks differ. Buffers that are changed meanwhile stay changed.
    """
    found = {id(each): each for module in modules for each in _saved_buffers(module)} if world.size > 1 else {}
    buffers = [*found.values()]
    digests = world.gather([digest_of([each]) for each in buffers])
    apart = [buffer for number, buffer in enumerate(buffers) if len({each[number] for each in digests}) > 1]
    own = [buffer.clone() for buffer in apart]
    for buffer in apart:
        buffer.copy_(of_rank_0(buffer, world))
    versions = [buffer._version for buffer in apart]
    try:
        yield
    finally:
        for buffer, before, version in zip(apart, own, versions, strict=True):
            if buffer._version == version:
                buffer.copy_(before)


def _saved_buffers(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and not in_pieces(buffer):
                yield buffer


def _checked(found: Any, *, size: int) -> Mapping[str, Tensor]:
    """Return the values of each sample by name, and the counts of a pair (sums, counts) as NAME/of."""
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the function of evaluate() returns {described(found)}: return a dict of tensors, one value per sample"
        )
    each = unpaired(found, "the function of evaluate()")
    check_names(found, "the function of evaluate()")
    for name, values in each.items():
        if not isinstance(values, Tensor) or values.shape != (size,):
            raise ConfigError(
                f"the function of evaluate() returns {described(values)} for {name.removesuffix(OF)}: give one value per sample, a "
                f"tensor [{size}], or a pair of them for a mean over something else, such as tokens: their sums, and how many"
            )
    return each
