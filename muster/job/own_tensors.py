"""Which modules and containers of tensors of the script's own a loop changes, and are not tracked: an average, a replay buffer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster.checkpoint.tensor_versions import SAMPLED_STEPS, Place, first_value, place, stored
from muster.job.carried_state import own_frames
from muster.job.own_objects import (
    FEW,
    MOST,
    MOST_IN_ALL,
    assigned_in,
    harmless,
    held_by,
    is_a,
    reads_itself,
    variables_of,
)
from muster.world.dtensor import own_piece

FEW_PARTS = 16
"""The most parts of an item of a container that is looked at."""
Found = Callable[[], Tensor | None]


class OwnTensors:
    """Modules and containers of tensors of the script's own that are not tracked, to see which of them a loop changes: an average, a replay buffer."""

    def __init__(self) -> None:
        self.is_broken = False
        self._before: dict[str, tuple[bool, list[Callable[[], bool]]]] = {}
        """By name, whether it is a module, and what tells whether a tensor of it, or what a container holds, has changed."""
        self._looks: dict[str, tuple[int, int]] = {}
        """The ids of what was looked at, and how often."""
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
        for name, value, owner in _named(frame):
            named, items = _untracked(name, value, known, modules), _items(value)
            of_owner = _looks_in_owner(owner, name.rpartition(".")[2], value)
            if (left_in_all := left_in_all - len(named) - len(items)) < 0:
                return
            if not (named or items or of_owner):
                continue
            known_as = (
                f"{id(value if owner is None else owner)} {name}"  # what an object has may be made anew in each step
            )
            if known_as not in self._held:
                self._held[known_as] = holds(value)
            if not self._held[known_as]:
                same, looks = self._looks.get(name, (0, 0))
                looks = looks + 1 if same == id(value) else 1
                self._looks[name] = id(value), looks
                self._before[name] = (
                    is_a(value, nn.Module),
                    [
                        *of_owner,
                        partial(_has_other_items, value, owner, name, items) if items else bool,
                        *(
                            partial(_is_changed, find, place(each), first_value(each) if looks <= SAMPLED_STEPS else "")
                            for find, each in named
                        ),
                    ],
                )

    @harmless
    def changed(self) -> list[tuple[str, bool]] | None:
        """Return the names of those that have changed since `begin`, and whether each is a module."""
        before, self._before = self._before, {}
        return [(name, is_module) for name, (is_module, looks) in before.items() if _is_any(looks)]


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return stored(own_piece(tensor)).untyped_storage().data_ptr()


def _named(frame: FrameType | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of variables around a loop, and of what those hold that are the script's own, each once; and what holds one."""
    seen = set[int]()
    for each in own_frames(frame):
        for name, value in variables_of(each).items():
            is_whole = is_a(value, nn.Module, Dataset, dict, list, deque)  # a data set may keep samples
            inner = {} if is_whole else held_by(value)
            for full, part, owner in ((name, value, None), *((f"{name}.{key}", inner[key], value) for key in inner)):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield full, part, owner


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
    if owner is None or not (is_a(value, dict) or _keeps(value)):
        return []
    kind: Any = type(owner)
    assigned, looks = assigned_in(kind), list[Callable[[], bool]]()
    if any(reads_itself(each, name) for each in assigned.get(f"self.{name}", ())):
        looks.append(partial(_is_remade, owner, name, id(value)))
    is_refilled = f"self.{name}[:]" in assigned or f"self.{name}[...]" in assigned  # in each step, say
    if is_a(value, np.ndarray) and not is_refilled:
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
    """Return the ids of a container's items, of one of many the first and last, if some hold tensors or arrays of several numbers."""
    if not is_a(value, dict, list, deque) or (is_a(value, dict) and len(value) > MOST):
        return []
    items = [*value.values()] if is_a(value, dict) else [*value] if len(value) <= MOST else [value[0], value[-1]]
    return [*map(id, items)] if any(map(_keeps, (*items[:FEW], *items[-FEW:]))) else []


def _has_other_items(value: Any, owner: Any, name: str, before: list[int]) -> bool:
    """Return whether a container has other items, or a list in its place in `owner`: a dict may be made for each step."""
    is_kept = owner is None or is_a(value, dict)
    return _items(value if is_kept else held_by(owner).get(name.rpartition(".")[2])) != before


def _keeps(item: Any, *, depth: int = 2) -> bool:
    """Return whether an item of a container is, or holds, what a step may have left: no output of a model, and no single number."""
    if is_a(item, Tensor):
        return item.numel() > 1 and item.grad_fn is None
    if is_a(item, np.ndarray):
        return bool(item.size > 1)
    parts = item.values() if is_a(item, dict) else item if is_a(item, tuple, list) else ()
    return depth > 0 and len(parts) <= FEW_PARTS and any(_keeps(each, depth=depth - 1) for each in parts)


def _untracked(name: str, value: Any, known: Collection[int], modules: Collection[int]) -> list[tuple[Found, Tensor]]:
    is_attribute = is_a(value, Tensor) and "." in name  # one of a variable may be made for each step
    try:
        found = _tensors([value] if is_attribute else value, modules)
        return [(find, tensor) for find, tensor in found if memory_of(tensor) not in known]
    except Exception:  # as of a lazy module
        return []


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
    elif is_a(value, dict, list) and len(value) <= MOST:
        for each in value.values() if is_a(value, dict) else value:
            if is_a(each, Tensor) and each.is_floating_point() and each.numel() > 1 and not each.is_inference():
                if each.grad_fn is None:  # an output of the model would hold its graph
                    yield ref(each), each


def _buffer(module: ref[nn.Module], name: str) -> Tensor | None:
    owner = module()
    return dict(owner._buffers.items()).get(name) if owner is not None else None  # TorchScript's has no get()
