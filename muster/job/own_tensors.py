"""Which modules and containers of the script's own a loop changes, and are not tracked: an average, a replay buffer, a list of losses."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster.checkpoint.tensor_versions import SAMPLED_STEPS, Place, first_value, place, stored
from muster.job.carried_state import own_frames
from muster.job.held_objects import saves_more
from muster.job.own_numbers import is_timed
from muster.job.own_objects import (
    FEW,
    MOST,
    MOST_IN_ALL,
    assigned_in,
    contents,
    found_by,
    harmless,
    held_by,
    is_a,
    reads_itself,
    variables_of,
)
from muster.world.dtensor import own_piece

LOOKS = 100
"""The first steps, in which a loop is looked at. Later it is in each so many-th one and in the last of an epoch, and its own numbers before a checkpoint."""
FEW_PARTS = 16
"""The most parts of an item of a container that is looked at."""
Found = Callable[[], Tensor | None]


MODULE, TENSORS, NUMBERS = "module", "tensors", "numbers"
"""Kinds of what is looked at: a module, tensors or arrays in a container or an attribute, and lists of numbers, which may grow."""


class OwnTensors:
    """Modules and containers of the script's own that are not tracked, to see which of them a loop changes: an average, a replay buffer."""

    def __init__(self) -> None:
        self.is_broken = False
        self._before: dict[str, tuple[str, list[Callable[[], bool]]]] = {}
        """By name, its kind, and what tells whether a tensor of it, or what a container holds, has changed."""
        self._seen: dict[str, tuple[tuple[int, int], int]] = {}
        """The ids of what has what was looked at, and of that, and how often it was."""
        self._held: dict[str, bool] = {}

    @harmless
    def begin(
        self,
        frame: FrameType | None,
        known: Collection[int],
        holds: Callable[[object], bool],
        modules: Collection[int],
    ) -> None:
        """Look at them before a step's body.

        known: memory of tracked tensors. holds: whether a tracked object has another. modules: ids of tracked modules and their parts.
        """
        left_in_all = MOST_IN_ALL
        for each in _named(frame):
            left_in_all -= sum(found_by(self._look_at, *each, known, holds, modules))
            if left_in_all < 0:
                return

    def _look_at(
        self,
        name: str,
        value: Any,
        owner: Any,
        known: Collection[int],
        holds: Callable[[object], bool],
        modules: Collection[int],
    ) -> Iterator[int]:
        """Look at one value, and yield how many tensors and items of it there are."""
        named, items = [*_untracked(name, value, known, modules)], _items(value)
        numbers = {} if items else _lists_of_numbers(name, value)
        if is_a(owner, nn.Module) and is_a(value, dict):  # mostly a cache, as of masks by their sizes
            named, items, numbers = [], [], {}
        looks_at_owner = _looks_in_owner(owner, name.rpartition(".")[2], value)
        yield len(named) + len(items)
        lasting = value if owner is None else owner  # what an object has may be made anew in each step
        ids, (before, looks) = (id(lasting), id(value)), self._seen.get(name, ((0, 0), 0))
        looks = looks + 1 if before[1] == ids[1] else 1
        self._seen[name] = ids, looks
        is_batch = before[0] != ids[0] and not is_a(value, nn.Module)  # perhaps, and must not be held longer
        if is_batch or not (named or items or looks_at_owner or numbers):
            return
        known_as = f"{id(lasting)} {name}"
        if known_as not in self._held:
            self._held[known_as] = holds(value)
        if self._held[known_as]:
            return
        if items and not _is_kept(value, owner):
            looks_at_owner.append(partial(_has_other_items, partial(_attribute, owner, name), items))
        elif items and looks > 1:
            looks_at_owner.append(partial(_has_other_items, partial(_itself, value), items))
        first = _no_value if SAMPLED_STEPS < looks <= LOOKS else first_value
        changes = [partial(_is_changed, find, place(each), first(each)) for find, each in named]
        self._before[name] = MODULE if is_a(value, nn.Module) else TENSORS, [*looks_at_owner, *changes]
        for full, each in numbers.items() if looks > 1 else ():
            self._before[full] = NUMBERS, [partial(_grows, each, [len(each), *_ends_of(each, len(each))])]

    @harmless
    def changed(self) -> list[tuple[str, str]] | None:
        """Return the names of those that have changed since `begin`, and the kind of each."""
        before, self._before = self._before, {}
        return [(name, kind) for name, (kind, looks) in before.items() if _is_any(looks)]


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return stored(own_piece(tensor)).untyped_storage().data_ptr()


def _named(frame: FrameType | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of variables around a loop, and of what those hold that are the script's own, each once; and what holds one."""
    seen = set[int]()
    for each in own_frames(frame):
        for name, value in variables_of(each).items():
            for full, part, owner in ((name, value, None), *found_by(_parts, name, value)):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield full, part, owner


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes of an object, or those of a module's parts that hold tensors beside its parameters and buffers; and what has one."""
    if is_a(value, nn.Module):
        for path, module in islice(value.named_modules(), MOST):
            for key, each in () if saves_more(module) else held_by(module).items():
                if key[:1] != "_" and (_keeps(each) or is_a(each, list, deque)):
                    yield f"{name}.{path}.{key}".replace("..", "."), each, module
    elif not is_a(value, Dataset, dict, list, deque):  # a data set may keep samples
        yield from ((f"{name}.{key}", each, value) for key, each in held_by(value).items())


def _is_any(looks: list[Callable[[], bool]]) -> bool:
    with contextlib.suppress(Exception):  # an object that cannot be looked at hides no other
        return any(look() for look in looks)
    return False


def _is_changed(find: Found, before: Place, value: str) -> bool:
    """Return whether a tensor, which is held weakly, has another place or value; see tensor_versions.py."""
    now = find()
    return now is not None and (place(now) != before or (bool(value) and first_value(now) != value))


def _looks_in_owner(owner: Any, name: str, value: Any) -> list[Callable[[], bool]]:
    """Return what tells whether an attribute has been changed in place, if it is an array, or was made of itself, as an average is."""
    if owner is None or not (is_a(value, dict, Tensor, np.ndarray) or _keeps(value)):
        return []
    kind: Any = type(owner)
    assigned, looks = assigned_in(kind), list[Callable[[], bool]]()
    if any(reads_itself(each, name) for each in assigned.get(f"self.{name}", ())):
        looks.append(partial(_is_remade, owner, name, id(value)))
    refills = [each for part in ("[:]", "[...]") for each in assigned.get(f"self.{name}{part}", ())]
    is_refilled = bool(refills) and not any(reads_itself(each, name) for each in refills)  # in each step, say
    if is_a(value, np.ndarray) and _keeps(value) and not is_refilled:
        looks.append(partial(_is_other_array, ref(value), _ends(value)))
    return looks


def _is_remade(owner: Any, name: str, before: int) -> bool:
    now = held_by(owner).get(name)
    return now is not None and id(now) != before


def _is_other_array(array: ref[Any], before: bytes) -> bool:
    now = array()
    return now is not None and _ends(now) != before


def _ends(array: Any) -> bytes:
    """Return the first and last values of an array; of objects, addresses."""
    return bytes(array.flat[:FEW].tobytes() + array.flat[-FEW:].tobytes())


def _items(value: Any) -> list[int]:
    """Return the ids of a container's items if some hold tensors or arrays of several numbers."""
    items = [] if is_a(value, tuple) else contents(value)
    return [*map(id, items)] if any(map(_keeps, (*items[:FEW], *items[-FEW:]))) else []


def _is_kept(value: Any, owner: Any) -> bool:
    """Return whether another container in its place is no change: a dict may be made for each step, and so may what a module shows of one."""
    return owner is None or is_a(value, dict) or is_a(owner, nn.Module)


def _has_other_items(find: Callable[[], Any], before: list[int]) -> bool:
    return _items(find()) != before


def _lists_of_numbers(name: str, value: Any, *, depth: int = 1) -> dict[str, list[Any] | deque[Any]]:
    """Return the lists of numbers, or of tuples or dicts of such, that `value` is or has; the last item stands for all of a list."""
    if is_a(value, dict) and depth and dict.__len__(value) <= FEW_PARTS:
        parts = [_lists_of_numbers(f"{name}[{key!r}]", each, depth=0) for key, each in dict.items(value)]
        return {full: each for part in parts for full, each in part.items()}
    is_list = is_a(value, list, deque) and not is_timed(name)
    return {name: value} if is_list and all(map(_is_of_numbers, [*islice(reversed(value), 1)])) else {}


def _is_of_numbers(item: Any, *, depth: int = 1) -> bool:
    if is_a(item, Tensor, np.ndarray):
        return len(item.shape) == 0 or item.shape == (1,)
    if is_a(item, dict, list, tuple) and depth:
        parts = contents(item)
        return 0 < len(parts) <= FEW_PARTS and any(_is_of_numbers(each, depth=0) for each in parts)
    return is_a(item, int, float, np.integer, np.floating)


def _grows(numbers: list[Any] | deque[Any], before: list[int]) -> bool:
    """Return whether a list has more items than `before`, and these still: it may have been begun anew."""
    number, *ends = before
    return len(numbers) > number and ends == _ends_of(numbers, number)


def _ends_of(numbers: list[Any] | deque[Any], number: int) -> list[int]:
    return [id(numbers[0]), id(numbers[number - 1])] if number else []


def _no_value(_: Tensor) -> str:
    return ""


def _itself(value: Any) -> Any:
    return value


def _attribute(owner: Any, name: str) -> Any:
    return held_by(owner).get(name.rpartition(".")[2])


def _keeps(item: Any, *, depth: int = 2) -> bool:
    """Return whether an item of a container is, or holds, what a step may have left: no output of a model, and no single number."""
    if is_a(item, Tensor):
        return item.numel() > 1 and item.grad_fn is None
    if is_a(item, np.ndarray):
        return bool(item.size > 1)
    parts = contents(item) if depth else []
    return len(parts) <= FEW_PARTS and any(_keeps(each, depth=depth - 1) for each in parts)


def _untracked(
    name: str, value: Any, known: Collection[int], modules: Collection[int]
) -> Iterator[tuple[Found, Tensor]]:
    is_attribute = is_a(value, Tensor) and "." in name  # one of a variable may be made for each step
    for find, tensor in _tensors([value] if is_attribute else value, modules):
        if memory_of(tensor) not in known:
            yield find, tensor


def _tensors(value: Any, modules: Collection[int]) -> Iterator[tuple[Found, Tensor]]:
    """Yield what finds them again, and the parameters and buffers of a module, or the tensors of a dict or list that have several numbers.

    modules: ids of modules whose buffers are left out.
    """
    if is_a(value, nn.Module):
        yield from ((ref(each), each) for each in value.parameters())
        for module in value.modules():
            if id(module) in modules:
                continue
            # By name: a forward pass may put another tensor in a buffer's place.
            yield from (
                (partial(_buffer, ref(module), name), each)
                for name, each in module._buffers.items()
                if each is not None
            )
    elif is_a(value, dict, list):
        for each in contents(value):
            if is_a(each, Tensor) and each.is_floating_point() and each.numel() > 1 and not each.is_inference():
                if each.grad_fn is None:  # an output of the model would hold its graph
                    yield ref(each), each


def _buffer(module: ref[nn.Module], name: str) -> Tensor | None:
    owner = module()
    return dict(owner._buffers.items()).get(name) if owner is not None else None  # TorchScript's has no get()
