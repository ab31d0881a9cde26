"""Metrics beside the loss: the objective's sums, and metrics with state."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from muster.checkpoint.schemas import direction
from muster.code_location import defined, described, is_raised_by_own, kind_and_message, name_of
from muster.errors import ConfigError, MusterError, say
from muster.train.objectives.by_slice import BySlice, by_slice
from muster.train.objectives.counted import Count, counted, times
from muster.train.objectives.entry import entry, logits_of, scalars
from muster.train.objectives.loss import loss_of, measured
from muster.train.objectives.reduced import FEW, Collectives, adds_up, depends, update_watched
from muster.train.objectives.samples import few
from muster.train.objectives.trial import Trial, copied, is_own, tried
from muster.world.counts import OF, means, unpaired
from muster.world.group import World

USUAL = ("loss", "accuracy", "perplexity")
"""What the kit's own objectives measure."""


def sums(
    objective: Any,
    outputs: Any,
    targets: Any,
    count: int,
    *,
    model: Any,
    inputs: Any = None,
    loss: Tensor | None = None,
    counts: Count | None = None,
) -> dict[str, Tensor]:
    """Return the objective's metrics summed over the `count` samples of a micro-batch.

    Without a method `metrics`: the loss, summed over what the objective counts, and the scalars that the model's outputs have by name, each
    a mean over the micro-batch. A metric may be a pair (sum, count) if it is a mean over something else, such as tokens or pixels.

    loss: the loss that the objective already returned for this micro-batch; one with state must not see a batch twice.
    counts: what the objective counts (`count_of`).
    """
    if not hasattr(objective, "metrics"):
        known = loss_of(objective, outputs, targets, model=model, trains=False) if loss is None else loss
        more = {name: value * count for name, value in scalars(outputs).items()}
        if not counts:
            return {"loss": known * count, **more}
        of = counted(counts, inputs, targets, count, objective=objective)
        return {"loss": times(known, of), f"loss{OF}": _count(of, like=known), **more}
    found = unpaired(measured(objective, outputs, targets, model=model), f"{name_of(objective)}.metrics")
    found |= {f"{name}{OF}": _count(found[f"{name}{OF}"], like=found[name]) for name in found if f"{name}{OF}" in found}
    wrong = {name: value for name, value in found.items() if not isinstance(value, Tensor) or value.numel() != 1}
    for name, value in wrong.items():
        raise ConfigError(
            f"{name_of(objective)}.metrics returns {described(value)} for {name.removesuffix(OF)}{defined(objective, 'metrics')}: "
            "give the sum over the samples, a tensor [], or a pair (sum, count) of them"
        )
    return found


def _count(value: Any, *, like: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value), device=like.device) if is_number and isinstance(like, Tensor) else value


def means_of_slices(totals: Mapping[str, float], *, count: float = 0.0) -> dict[str, float]:
    """Return the `means` of sums over all ranks. Keys are `SLICE/name` or `name`; the slices of a name are added in the order given.

    count: the number of samples, if `totals` does not have it as `SEEN`.
    """
    added: dict[str, float] = {}
    for key, total in totals.items():
        name = key.partition("/")[2] if key.partition("/")[0].isdigit() or key.startswith("/") else key
        added[name] = added.get(name, 0.0) + total
    return means(added, count=count)


def in_full(outputs: Any) -> Any:
    """Return the outputs with tensors of 16 bits in fp32: a sigmoid in bf16 makes many unequal logits equal."""
    halves = (torch.bfloat16, torch.float16)
    return pytree.tree_map_only(Tensor, lambda each: each.float() if each.dtype in halves else each, outputs)


class Measures:
    """Metrics of `metrics.NAME` with the interface of torchmetrics: `update(outputs, targets)`, `compute()`, `reset()`.

    Their `compute` adds up their states over the ranks and is collective. It returns a number, or several by name.

    of: metric's name -> the entry of the model's outputs that it takes. Without one a metric takes the outputs as they are, and one of
        torchmetrics their `logits` if they are as Hugging Face's models give them.
    anew: what builds a metric anew, on the CPU.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        *,
        sliced: bool = False,
        of: Mapping[str, str | int] | None = None,
        anew: Mapping[str, Callable[[], Any]] | None = None,
    ):
        self._of, self._anew = of or {}, anew or {}
        self._picks = {name for name, metric in named.items() if type(metric).__module__.startswith("torchmetrics.")}
        self.named = {name: by_slice(metric, name) if sliced else metric for name, metric in named.items()}
        self._first = dict[str, tuple[Any, Any]]()
        """Of each metric's first micro-batch with other ranks, a few samples."""
        self._talks = set[str]()
        """Names of the metrics that communicate."""
        self._wrong = dict[str, str]()
        """What metrics of the user's own were seen to give for samples on several ranks, if it is not what one rank gives."""
        self._trials = dict[str, Trial | None]()

    def update(self, outputs: Any, targets: Any, *, slice: int) -> None:
        """`slice`: number of the slice of the global batch that the micro-batch is of."""
        for name, metric in self.named.items():
            taken = in_full(self._taken(name, outputs))
            self._try(name, taken, targets)
            try:
                if isinstance(metric, BySlice):
                    metric.update(taken, targets, slice=slice, trial=self._trials.get(name))
                elif name not in self._first and dist.is_initialized() and dist.get_world_size() > 1:
                    self._update_first(name, taken, targets)
                else:
                    metric.update(taken, targets)
            except Exception as error:
                if isinstance(error, MusterError | torch.OutOfMemoryError) or is_raised_by_own(error):
                    raise
                raise _misfit(name, metric, taken, targets, error) from error

    def _try(self, name: str, outputs: Any, targets: Any) -> None:
        """Before its first update, see whether a metric of the user's own puts ranks or slices together."""
        metric = self.named[name]
        is_several = dist.is_initialized() and dist.get_world_size() > 1
        if name in self._trials or not (is_several or isinstance(metric, BySlice)):
            return
        whole = metric.metric if isinstance(metric, BySlice) else metric
        if not is_own(whole):
            self._trials[name] = None
            return
        self._trials[name] = trial = tried(whole, (outputs, targets), self._anew.get(name))
        if trial and trial.said:
            self._wrong[name] = trial.said
        if trial and trial.talks and is_several:
            raise ConfigError(
                f"metrics.{name}: {name_of(whole)} communicates while it is updated{defined(whole, 'update')}: ranks may have "
                "different numbers of batches, and would wait for each other for ever; communicate in compute alone"
            )
        if is_several and dist.get_rank():
            return
        unknown = f"whether {name_of(whole)} adds everything up over ranks and slices is not known"
        if trial is None:
            say(f"muster: metrics.{name} could not be tried: {unknown}")
        elif trial.unknown and not trial.said:
            values = ", ".join(f"{name}_{each}" if each else name for each in trial.unknown)
            say(
                f"muster: metrics.{name} was tried, and {values} is 0, NaN, another one each time, or only nearly that of one rank: {unknown}"
            )

    def _update_first(self, name: str, outputs: Any, targets: Any) -> None:
        metric = self.named[name]
        self._first[name] = few((outputs, targets), FEW)
        with contextlib.nullcontext() if adds_up(metric) else Collectives() as collectives:
            update_watched(metric, lambda: metric.update(outputs, targets), name=name, trial=self._trials.get(name))
        if collectives and collectives.were_seen:
            self._talks.add(name)

    def _taken(self, name: str, outputs: Any) -> Any:
        if name in self._of:
            return entry(outputs, self._of[name], key=f"metrics.{name}.of")
        return logits_of(outputs) if name in self._picks else outputs

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Update and compute copies of the metrics inside the context."""
        kept, self.named = self.named, {name: copied(metric) for name, metric in self.named.items()}
        try:
            yield
        finally:
            self.named = kept

    def compute(self, world: World) -> dict[str, float]:
        """Return all values since the last reset by name, and reset. Collective.

        Raises ConfigError: a value is not a number, two metrics give one name, or a metric of the user's own does not add up.
        """
        fill_lists(self.named, world)
        found, of = dict[str, float](), dict[str, str]()
        for name, metric in self.named.items():
            if world.size > 1 and adds_up(metric):
                self._talks.add(name)
            is_watched = world.size > 1 and name not in self._talks
            with Collectives() if is_watched else contextlib.nullcontext() as collectives:
                value = metric.compute()
            if collectives and collectives.were_seen:
                self._talks.add(name)
            own, each = dict[str, float](), {name: value}
            if isinstance(value, Mapping):
                each = {f"{name}_{key}": one for key, one in value.items()}
            for key, one in each.items():
                try:
                    own[key] = float(one)
                except (TypeError, ValueError, RuntimeError):
                    raise ConfigError(_no_number(name, key, one, metric)) from None
            if twice := sorted(own.keys() & found.keys()):
                raise ConfigError(f"metrics.{name} and metrics.{of[twice[0]]} both give {twice[0]}: rename one of them")
            found |= own
            of |= dict.fromkeys(own, name)
            metric.reset()
        if world.size == 1:
            self._refuse(self._wrong)
        return self._of_all(found, of, world) if self.named and world.size > 1 else found

    def _refuse(self, wrong: Mapping[str, str]) -> None:
        for name, said in wrong.items():
            raise self._of_own_samples(name, f"{name} {said}")

    def _of_all(self, values: dict[str, float], of: Mapping[str, str], world: World) -> dict[str, float]:
        """Return rank 0's values; `of`: the name of the metric that has given each. Collective.

        A metric that communicates may give NaN on other ranks: it computes on rank 0 alone. One that does not, and gives the same on all, must
        not depend on the samples. Raises ConfigError: the value of a rank is of its own samples alone.
        """
        everybody = world.gather([values, of, sorted(self._talks), self._wrong])
        firsts, of_firsts, *_ = everybody[0]
        for *_, wrong in everybody:
            self._refuse(wrong)
        talks = {name for _, _, names, _ in everybody for name in names}
        for rank, (other, *_) in enumerate(everybody):
            for key, here in firsts.items():
                there = other.get(key, math.nan)
                is_none = math.isnan(there) and (of_firsts[key] in talks or math.isnan(here))
                if not is_none and not math.isclose(here, there, rel_tol=1e-4, abs_tol=1e-12):
                    said = f"{key} {here:.6g} on rank 0 and {there:.6g} on rank {rank}, each of the samples of its own rank"
                    raise self._of_own_samples(of_firsts[key], said)
        silent = sorted(self.named.keys() - talks)  # the same on all ranks, whatever each has measured
        alone = {name: depends(self.named[name], self._first.get(name)) for name in silent}
        for name in silent:
            if world.lowest(alone[name]) is not None:
                raise self._of_own_samples(name, f"{name} the same on each rank, each of the samples of its own rank")
        return dict(firsts)

    def _of_own_samples(self, name: str, said: str) -> ConfigError:
        metric = self.named[name]
        metric = metric.metric if isinstance(metric, BySlice) else metric
        return ConfigError(
            f"metrics: {name_of(metric)}.compute gives {said}{defined(metric, 'compute')}: add its state up over the ranks "
            "there (torch.distributed.all_reduce), or derive the class from torchmetrics.Metric, with add_state(..., dist_reduce_fx='sum')"
        )

    def direction(self, metric: str, *, key: str, mode_key: str, mode: str = "auto", recorded: str = "") -> str:
        """Return `min` or `max`: which value of `metric` is the best one.

        `mode` decides if it is not `auto`; then the metric's own `higher_is_better`; then its name; then `recorded`, what an earlier attempt
        went by. Raises ConfigError: nothing decides; the message names `key`, and `mode_key` to say it by.
        """
        if mode != "auto":
            return mode
        each = self.named.get(metric)
        own = getattr(each.metric if isinstance(each, BySlice) else each, "higher_is_better", None)
        if isinstance(own, bool):
            return "max" if own else "min"
        if found := direction(metric) or recorded:
            return found
        close = difflib.get_close_matches(metric, sorted({*self.named, *USUAL}), n=1, cutoff=0.8)
        meant = f"did you mean {close[0]}? Its" if close and close[0] != metric else "its"
        raise ConfigError(
            f"{key}={metric}: {meant} name does not say whether less or more of it is better: write {mode_key}=min, or max"
        )

    def reset(self) -> None:
        """Discard the state of an aborted evaluation."""
        for metric in self.named.values():
            metric.reset()


def _no_number(name: str, key: str, value: Any, metric: Any) -> str:
    if not isinstance(value, Tensor) and not hasattr(value, "__len__"):
        return f"metrics.{name} gives {described(value)} for {key}: give a number{defined(metric, 'compute')}"
    unreduced = [each for each, how in getattr(metric, "_reductions", {}).items() if how is None]
    more = f"; {unreduced[0]} has a value of each rank, for want of dist_reduce_fx in add_state" if unreduced else ""
    return f"metrics.{name} has more than one number for {key}: choose an average of them{more}"


def _misfit(name: str, metric: Any, outputs: Any, targets: Any, error: Exception) -> ConfigError:
    kind = name_of(metric.metric if isinstance(metric, BySlice) else metric)
    remedy = "give it values that it accepts, or use a class of your own"
    if is_own(metric.metric if isinstance(metric, BySlice) else metric):
        remedy = f"its update{defined(metric, 'update')} is called with two: update(outputs, targets)"
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        named = (
            next((name for name, value in outputs.items() if isinstance(value, Tensor)), None)
            if isinstance(outputs, Mapping)
            else None
        )
        remedy = f"write +metrics.{name}.of={named} for one entry of the outputs, or derive" if named else "derive"
        remedy += f" a class from it whose update(outputs, targets) picks the tensors, and write metrics.{name}._target_=package.module.Class"
    return ConfigError(
        f"metrics.{name}: {kind} cannot be updated with outputs that are {described(outputs)} and targets that are {described(targets)} "
        f"({': '.join(kind_and_message(error))[:200]}): {remedy}"
    )


def fill_lists(metrics: Mapping[str, Any], world: World) -> None:
    """Give ranks without samples empty tensors like those of other ranks, for metrics with lists, as torchmetrics' curves. Collective.

    torchmetrics gathers tensors of the same dtype and number of dimensions; an empty list has neither.

    Raises ConfigError: a metric keeps its samples apart, and ranks have different numbers of them.
    """
    if world.size == 1:
        return
    lists = list(_lists(metrics))
    if not lists:
        return
    for _, metric, attribute, joined in lists:
        if joined and (values := getattr(metric, attribute)):
            setattr(
                metric, attribute, [torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])]
            )
    everybody = world.gather([_look(getattr(metric, attribute)) for _, metric, attribute, _ in lists])
    for (name, metric, attribute, joined), looks in zip(lists, zip(*everybody, strict=True), strict=True):
        like = next((look for look in looks if look["length"]), None)
        if not joined and len({look["length"] for look in looks}) > 1:
            raise ConfigError(
                f"metrics.{name} gathers sample by sample, and the ranks have different numbers of them: "
                "use batches that are equally large on all ranks, or evaluate with one rank: muster evaluate"
            )
        if like and not getattr(metric, attribute):
            dtype = getattr(torch, like["dtype"])
            setattr(metric, attribute, [torch.empty((0, *like["sizes"]), dtype=dtype, device=world.device)])


def _lists(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield (name, metric, attribute, is_joined) of each list state; a joined one is concatenated into one tensor."""
    for name, outer in metrics.items():
        for metric in outer.modules() if isinstance(outer, nn.Module) else ():
            for attribute, reduction in getattr(metric, "_reductions", {}).items():
                if isinstance(getattr(metric, attribute), list):
                    yield name, metric, attribute, getattr(reduction, "__name__", "") == "dim_zero_cat"


def _look(values: list[Any]) -> dict[str, Any]:
    first = values[0] if values else torch.empty(0)
    return {"length": len(values), "dtype": str(first.dtype).removeprefix("torch."), "sizes": list(first.shape[1:])}
