"""What tracked objects hold, and so may save: optimizers, learning rate schedules and gradient scalers that are not tracked by themselves."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils import _pytree as pytree

from muster.job.own_objects import attributes_of
from muster.job.tracked_state import Tracked

ELSEWHERE = (Tensor, nn.Module, LRScheduler, str, bytes, type, FunctionType, ModuleType)
"""Kinds of objects in which no optimizer is looked for. A scheduler's state dict leaves its optimizer out."""
BESIDE = (LRScheduler, torch.amp.GradScaler)
MOST_SEEN = 10_000
"""Objects that are looked at in search of an optimizer."""


def saves(tracked: Tracked, optimizer: Optimizer) -> bool:
    """Return whether the state of `optimizer`, which has made a step, is saved: by itself or by an object that holds it.

    The `state_dict()` of a wrapper has the optimizer's tensors; that of an object which only reads it, as a schedule, has not.
    For a state without tensors, as plain SGD's, holding the optimizer is enough.
    """
    optimizers, others = tracked.optimizers.values(), tracked.others.values()
    if any(each is optimizer for each in optimizers):
        return True
    own = {id(leaf) for leaf in pytree.tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)}
    if not own:
        return any(_holds(each, lambda part: part is optimizer) for each in (*optimizers, *others))
    extra = [
        value
        for module in tracked.modules.values()
        for value in module.state_dict().values()
        if not isinstance(value, Tensor)
    ]
    states = [[*each.state.values()] for each in optimizers]
    return own <= {id(leaf) for leaf in pytree.tree_leaves([*extra, *states, *(each.state_dict() for each in others)])}


def holds(tracked: Tracked, thing: object) -> bool:
    """Return whether a tracked object that is no module holds `thing`, and so may save it."""
    of_optimizers = ([each.param_groups, each.state] for each in tracked.optimizers.values())
    return any(_holds(each, lambda part: part is thing) for each in (*tracked.others.values(), *of_optimizers))


def saves_more(module: object) -> bool:
    """Return whether an object is a module that saves more than its parameters and buffers."""
    kind = type(module)
    return issubclass(kind, nn.Module) and kind.get_extra_state is not nn.Module.get_extra_state


def untracked_beside(tracked: Tracked, optimizer: Optimizer) -> list[LRScheduler | torch.amp.GradScaler]:
    """Return the learning rate schedulers of `optimizer`, and the gradient scaler that steps it, that are not tracked.

    One is by itself, or in an object that is. It searches all objects of the process, which takes a tenth of a second.
    """
    saved: list[Any] = []

    def note(part: object) -> bool:
        if isinstance(part, BESIDE):
            saved.append(part)
        return False

    extra = (part for module in tracked.modules.values() for part in module.modules() if saves_more(part))
    for each in (*tracked.others.values(), *([*vars(part).values()] for part in extra)):
        _holds(each, note)
    for schedule in saved:  # which grows
        saved += getattr(schedule, "_schedulers", [])  # of ChainedScheduler and SequentialLR
    kept = {*map(id, saved)}
    found = [each for each in gc.get_objects() if issubclass(type(each), BESIDE) and id(each) not in kept]
    chained = (each for each in found if isinstance(each, ChainedScheduler))  # has no state but that of its parts
    kept |= {id(each) for each in chained if kept.issuperset(map(id, each._schedulers))}
    return [each for each in found if id(each) not in kept and _is_of(each, optimizer)]


def _is_of(beside: Any, optimizer: Optimizer) -> bool:
    """Return whether a schedule sets an optimizer's rates, or a gradient scaler has seen its gradients since its last update."""
    scaled: Any = getattr(beside, "_per_optimizer_states", ())
    return getattr(beside, "optimizer", None) is optimizer or id(optimizer) in scaled


def _holds(whole: object, is_it: Callable[[object], bool]) -> bool:
    """Return whether `is_it` is true of `whole`, or of something in its attributes, or in containers there."""
    seen, left = set[int](), deque([whole])
    while left and len(seen) < MOST_SEEN:
        each = left.popleft()  # the nearest first: a long list hides nothing beside it
        if is_it(each):
            return True
        if id(each) in seen or isinstance(each, ELSEWHERE):
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        else:
            left += attributes_of(each, most=MOST_SEEN).values()
    return False
