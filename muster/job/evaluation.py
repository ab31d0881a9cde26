"""Exact evaluations for a loop of a user's own: every sample once, the same batches at any world size; and which of them is the best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from muster.attempt.best import best_of, change_of_search, value_of
from muster.attempt.evaluation import sums_over
from muster.checkpoint.digests import digest_of
from muster.checkpoint.manager import Checkpoints
from muster.checkpoint.schemas import direction
from muster.checkpoint.tensor_versions import Changes
from muster.code_location import described
from muster.data.fingerprint import fingerprint
from muster.data.loader import Batch, LoaderConfig, batches
from muster.errors import ConfigError
from muster.job.batch_source import at_least_one, is_loader, with_length
from muster.job.replicas import of_rank_0
from muster.job.tracked_state import Tracked
from muster.loggers.metrics import check_names
from muster.sample_plan import Dealt, Plan
from muster.world.counts import OF, SEEN, means, unpaired
from muster.world.dtensor import in_pieces
from muster.world.group import World

BEST_KEY, MODES = "evaluate(): best", ("auto", "min", "max")
SWAPPED = (
    "the body of step {step} has changed the model since evaluate(best=...), as code that puts an average's weights in for it and takes them out again: "
    "the checkpoint that is kept has the weights of now; evaluate a module of its own that is tracked, as an EMA"
)
TWICE = (
    "evaluate() gives {name} {what}: records, charts and `muster load` have both under one name; give each evaluation's values names of their own, such as "
    "quick_{name}"
)
SAME = 0.05
"""A relative difference of what is measured twice at a step: a GPU may turn a sample."""
EVALUATED = 8
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


class Evaluations:
    """What is known of a job's evaluations. enter: notes for the heartbeat what the rank is at."""

    def __init__(self, tracked: Tracked, world: World, *, enter: Callable[[str], None]):
        self._tracked, self._world, self._enter = tracked, world, enter
        self.best: dict[str, Any] | None = None
        """The best evaluation so far (attempt/best.py)."""
        self._search: tuple[tuple[str, str], int, str, float] | None = None
        """By which metric and direction this attempt has last chosen it; at which step, on which data, and the value."""
        self.data: str | None = None
        """The fingerprint of what this attempt has last chosen by, also on a rank that was restarted in place; empty if it is another each time."""
        self._chosen: Changes | None = None
        """The parameters as they were when an evaluation was the best."""
        self._chosen_on: tuple[Callable[[], Any], str] | None = None
        """The data set of the last evaluation that has chosen, held weakly, and its fingerprint."""
        self._compared: list[Callable[[], Any]] = []
        """The data sets of the first evaluations, held weakly."""
        self._measured: dict[str, tuple[int, int, float]] = {}
        """By name of a value, the step at which it was last measured, and over how many samples."""

    def refuse_other_samples(self, dataset: Any) -> None:
        """Raise DataError unless all ranks evaluate on the same samples, as far as some of them show. Collective."""
        is_new = len(self._compared) < EVALUATED and not any(each() is dataset for each in self._compared)
        if self._world.size == 1 or self._world.lowest(is_new) is None:
            return
        self._enter("evaluation")
        self._compared.append(_weakly(dataset))
        remedy = "give all ranks the same samples, in the same order; the first and the last one are compared, of paths the names"
        seen = fingerprint(with_length(dataset, "evaluate"), most=2, paths=False)
        self._world.same("evaluate(): the data set", seen, remedy=remedy)

    def twice(self, values: Mapping[str, float], *, step: int, size: int) -> str:
        """Return a line if two evaluations give unlike values one name: at one step, or over unlike many samples; empty if not."""
        for name, value in values.items():
            before, self._measured[name] = self._measured.get(name), (step, size, value)
            if before and before[1] != size:
                return TWICE.format(name=name, what=f"of {before[1]} samples and of {size}")
            if before and before[0] == step and repr(before[2]) != repr(value):  # one that is NaN is alike, too
                return TWICE.format(name=name, what=f"twice at step {step}")
        return ""

    def choose(
        self,
        values: Mapping[str, float],
        dataset: Any,
        *,
        metric: str,
        mode: str,
        step: int,
        checkpoints: Checkpoints | None,
        note: Callable[[str], None],
    ) -> bool:
        """Return True if the evaluation on `dataset` at `step` is the best so far, so that its checkpoint must be kept. Collective.

        checkpoints: None if the evaluation does not count. note: records a note.
        Raises ConfigError: it is not clear which value is the best.
        """
        value = value_of(metric, values, key=BEST_KEY)
        if mode not in MODES:
            raise ConfigError(f"evaluate(best_mode={mode!r}): give {', '.join(MODES[:-1])} or {MODES[-1]}")
        if not (mode := direction(metric) if mode == "auto" else mode):
            raise ConfigError(
                f"{BEST_KEY}={metric}: its name does not say whether less or more of it is better: write best_mode='min', or 'max'"
            )
        data = self._fingerprint(dataset)
        self._refuse_second_choice((metric, mode), step, data, value)
        if checkpoints is None:
            return False
        if self.data not in (None, data):  # others each time, as rollouts: from now on they are not compared
            data = ""
            self.best = self.best and {**self.best, "data": ""}
        self.data = data
        if text := change_of_search(self.best, metric, mode, key=BEST_KEY, step=step, data=data):
            note(text)
            self.best = None
        self.best = best_of(self.best, value, checkpoints, metric=metric, mode=mode, step=step, data=data)
        if self.best["step"] == step:
            self._chosen = Changes(self._tracked.named.items())
            self._chosen.look()
        return bool(self.best["step"] == step)

    def swapped(self, step: int) -> str:
        """Return, before `step` is saved, a line if it was the best evaluation of other weights; empty if not. It is said once."""
        chosen, self._chosen = self._chosen, None
        if chosen is None or self.best is None or self.best["step"] != step:
            return ""
        return SWAPPED.format(step=step) if chosen.changed() or chosen.changed_unseen() else ""

    def _fingerprint(self, dataset: Any) -> str:
        """Return rank 0's fingerprint of an evaluation's data set, looked at once. Collective."""
        is_same = self._chosen_on is not None and self._chosen_on[0]() is dataset
        if self._world.lowest(not is_same) is not None or self._chosen_on is None:
            self._enter("evaluation")
            data = self._world.on_first(lambda: fingerprint(with_length(dataset, "evaluate"), paths=False))
            self._chosen_on = _weakly(dataset), data
            self._enter("step")
        return self._chosen_on[1]

    def _refuse_second_choice(self, search: tuple[str, str], step: int, data: str, value: float) -> None:
        """Raise ConfigError if this attempt chooses by another metric, too, or by other data or another value at this step."""
        now = search, step, data, value
        (before, then, of, other), self._search = self._search or now, now
        only = "one evaluation of a job chooses the best: give best= to one, and names of their own to the values of others"
        if search != before:
            raise ConfigError(
                f"{BEST_KEY} chooses by {search[0]} ({search[1]}), and has chosen by {before[0]} ({before[1]}): {only}"
            )
        is_same = math.isclose(value, other, rel_tol=SAME) or (math.isnan(value) and math.isnan(other))
        if step == then and not (is_same and data == of):
            raise ConfigError(f"{BEST_KEY}={search[0]} is {other:.6g} and then {value:.6g} at step {step}: {only}")


def _weakly(thing: Any) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # a list, for example
        return lambda: thing
