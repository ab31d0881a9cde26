"""The options that a loop has built its optimizers, schedules and layers with; a resume loads the checkpoint's in place of the first two."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from muster.job.tracked_state import Tracked

MOST_TOLD = 6
"""The most options that a message names."""
NO_OPTIONS = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "self",
    "optimizer",
    "schedulers",
    "last_epoch",
    "lr_lambdas",
    "verbose",
)
"""What says how a step is computed, and what is no number."""
OF_TORCH = ("_schedule_phases", "_anneal_func_type")
"""What OneCycleLR keeps its options in."""

IN_PROPORTION = (
    lr_scheduler.ConstantLR, lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.ExponentialLR,
    lr_scheduler.LambdaLR, lr_scheduler.LinearLR, lr_scheduler.MultiplicativeLR, lr_scheduler.MultiStepLR, lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)  # fmt: skip
"""Schedules whose rates are in proportion to their `base_lrs`, unless they end at an `eta_min` above 0."""

_tracked_before = WeakSet[Any]()


def options_of(tracked: Tracked) -> dict[str, Any]:
    """Return name -> option of each optimizer and schedule, as JSON has it: `{"optimizer.lr": 0.1, "schedule.T_max": 32}`.

    They are the options that the constructors name and the objects keep; for a torch schedule, also what is in its state.
    A later group is `optimizer.1.lr`, and so is a part of a schedule. Empty if one of the objects was tracked before in this process:
    it is not as it was built.
    """
    optimizers, schedules = tracked.optimizers, {name: _schedule(each) for name, each in tracked.others.items()}
    objects = [*optimizers.values(), *filter(None, schedules.values())]
    try:
        if any(each in _tracked_before for each in objects):
            return {}
        _tracked_before.update(objects)
    except TypeError:  # one that has no hash
        return {}
    found = dict[str, Any]()
    for name, optimizer in optimizers.items():
        found |= _of_groups(name, optimizer)
    for name, schedule in schedules.items():
        if schedule is not None:
            found |= _of_schedule(name, schedule)
    return found


def layers_of(tracked: Tracked) -> dict[str, dict[str, int]]:
    """Return by module how many layers of torch's it has of each kind and options: `{"model": {"Dropout(p=0.1, inplace=False)": 2}}`."""
    return {
        name: Counter(
            re.sub(" at 0x[0-9a-f]+", "", repr(each))
            for each in module.modules()
            if type(each).__module__.startswith("torch.nn.modules.") and not [*each.children()]
        )
        for name, module in tracked.modules.items()
    }


def other_layers(before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (module, its layers before, those here) of layers that differ, as `2 Dropout(p=0.1, inplace=False)`."""
    for name in sorted(before.keys() & here.keys()):
        left, new = Counter(before[name]) - Counter(here[name]), Counter(here[name]) - Counter(before[name])
        if left or new:
            yield name, _counted(left), _counted(new)


def _counted(layers: Mapping[str, int]) -> str:
    parts = [f"{count} {layer}" for layer, count in sorted(layers.items())]
    left = [f"{len(parts) - MOST_TOLD} more kinds"] if len(parts) > MOST_TOLD else []
    return ", ".join([*parts[:MOST_TOLD], *left]) or "no such layer"


def schedule_of(tracked: Tracked, optimizer: str) -> LRScheduler | None:
    """Return the tracked schedule that sets the rates of the optimizer of this name; None without one."""
    groups = tracked.optimizers[optimizer].param_groups  # those of the optimizer within, if it is in a wrapper
    schedules = filter(None, map(_schedule, tracked.others.values()))
    return next((each for each in schedules if getattr(each.optimizer, "param_groups", None) is groups), None)


def base_rates(schedule: LRScheduler) -> list[float]:
    """Return the rates from which a schedule and its parts begin; empty if it has none, as ReduceLROnPlateau."""
    return [float(rate) for each in (schedule, *_parts(schedule)) for rate in getattr(each, "base_lrs", ())]


def is_in_proportion(schedule: LRScheduler) -> bool:
    """Return True if all rates of a schedule of torch's are in proportion to its base rates."""
    if parts := _parts(schedule):
        return all(map(is_in_proportion, parts))
    return isinstance(schedule, IN_PROPORTION) and not getattr(schedule, "eta_min", 0)


def differences(before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, option before, option here) where both have the option and differ."""
    for name, value in here.items():
        if name in before and not _is_same(before[name], value):
            yield name, before[name], value


def is_changed_alike(
    before: Mapping[str, Any], now: Mapping[str, Any], changed: tuple[str, Any, Any], *, ranks: tuple[int, int]
) -> bool:
    """Return True if some value of `before` and `now`, by name, has changed as an option has: the script was given it.

    One that has changed with the number of `ranks`, before and now, or with its square root, may follow from that.
    """
    _, old, new = changed
    if bool in (type(old), type(new)) or _follows(old, new, ranks):
        return False
    pairs = [(before[name], value) for name, value in now.items() if name in before]
    return any(_is_same(one, old) and _is_same(other, new) for one, other in pairs if type(other) is not bool)


def _follows(old: Any, new: Any, ranks: tuple[int, int]) -> bool:
    kinds = (int, float)
    if ranks[0] == ranks[1] or not (isinstance(old, kinds) and isinstance(new, kinds) and old and new):
        return False
    growth, of_ranks = abs(math.log(abs(new / old))), abs(math.log(ranks[1] / ranks[0]))
    return any(math.isclose(growth, each, rel_tol=1e-6) for each in (of_ranks, of_ranks / 2))


def told(path: str, changed: Sequence[tuple[str, Any, Any]]) -> str:
    """Return in one line which options of the checkpoint at `path`, from `differences`, are loaded in place of others."""
    public = [each for each in changed if not each[0].endswith(OF_TORCH)] or changed  # from which torch's own follow
    pairs = [f"{name}={before}, and this is {name}={now}" for name, before, now in public]
    left = [f"{len(pairs) - MOST_TOLD} more"] if len(pairs) > MOST_TOLD else []
    verb = "is" if len(pairs) == 1 else "are"
    return f"{path} was written with {'; '.join([*pairs[:MOST_TOLD], *left])}, in place of which the checkpoint's {verb} loaded"


def is_length(tracked: Tracked, changed: tuple[str, Any, Any]) -> bool:
    """Return True for a schedule's option that is a number of steps, as T_max, or a list of them."""
    (name, before, _), own = changed, {*tracked.others}
    numbers = before if isinstance(before, list) else [before]
    return name.partition(".")[0] in own and all(type(each) is int for each in numbers)


def _schedule(thing: Any) -> LRScheduler | None:
    """Return a schedule, also that in Accelerate's wrapper."""
    inner = getattr(thing, "__dict__", {}).get("scheduler")
    return next((each for each in (thing, inner) if isinstance(each, LRScheduler)), None)


def _parts(schedule: LRScheduler) -> list[LRScheduler]:
    return [*getattr(schedule, "_schedulers", ())]


def _of_groups(name: str, optimizer: Optimizer) -> dict[str, Any]:
    found = dict[str, Any]()
    for number, group in enumerate(optimizer.param_groups):
        place = f"{name}.{number}" if number else name
        options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        options["lr"] = group.get("initial_lr", group.get("lr"))  # `lr` itself is set by a schedule already
        found |= _plain(place, options)
    return found


def _of_schedule(name: str, schedule: LRScheduler) -> dict[str, Any]:
    options = dict[str, Any]()
    if type(schedule).__module__.startswith("torch."):
        state = schedule.state_dict()
        options |= {key: value for key, value in state.items() if not key.startswith("_") or key in OF_TORCH}
    for key in inspect.signature(type(schedule)).parameters:
        with contextlib.suppress(Exception):  # a class of the user's own
            options[key] = getattr(schedule, key) if hasattr(schedule, key) else getattr(schedule, f"_{key}")
    found = _plain(name, options)
    for number, part in enumerate(_parts(schedule)):
        found |= _of_schedule(f"{name}.{number}", part)
    return found


def _plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `options` that are numbers, texts, None or short lists of them."""
    found = dict[str, Any]()
    for key, value in options.items():
        several = sorted(value.elements()) if isinstance(value, Counter) else value
        is_list = isinstance(several, list | tuple)
        parts = [each for part in (several if is_list else [several]) for each in _within(part)]
        if key not in NO_OPTIONS and type(value) is not dict and len(parts) <= 100 and all(map(_is_plain, parts)):
            found[f"{name}.{key}"] = parts if is_list else parts[0]
    return found


def _within(part: Any) -> list[Any]:
    if isinstance(part, dict) and part:
        return [*part.values()]
    is_number = isinstance(part, np.generic) or (isinstance(part, Tensor) and part.numel() == 1)
    return [part.item() if is_number else part]


def _is_plain(part: Any) -> bool:
    return math.isfinite(part) if isinstance(part, float) else part is None or isinstance(part, bool | int | str)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) or isinstance(other, float):  # a tensor's has fewer digits
        return (
            isinstance(one, int | float) and isinstance(other, int | float) and math.isclose(one, other, rel_tol=1e-6)
        )
    return bool(one == other)
