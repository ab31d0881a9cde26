"""What the script's own objects keep of the steps, and no checkpoint has: generators, weights, and numbers in attributes and global names.

They are found by the variables of the functions around the loop, and of their modules. Only values are looked at: nothing is attached to the
objects.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import math
import re
import textwrap
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster.checkpoint.tensor_versions import SAMPLED_STEPS, Place, first_value, place, stored
from muster.code_location import is_own
from muster.data.own_generators import KINDS, OwnGenerators, is_global, is_of_user
from muster.job.carried_state import Loop, assigned, local_names, loop_of, own_frames, parts, values_of
from muster.world.dtensor import own_piece

MOST, MOST_IN_ALL = 1_000, 5_000
"""The most items of a container that is looked at, and the most global names, and tensors, in all."""
FEW, FEW_PARTS = 4, 16
"""The most items of a list of numbers that is looked at; the most parts of an item of a container, and environments and their wrappers."""
TIMED = ("time", "elapsed", "second", "duration", "clock")
"""What names of numbers have in them that follow a clock."""
DAY_S = 86_400.0
Found = Callable[[], Tensor | None]


def harmless(look: Callable[..., Any]) -> Callable[..., Any]:
    """Return `look` so that an object of the script's own that cannot be looked at ends no run: then it finds nothing any more."""

    @functools.wraps(look)
    def tried(self: Any, *given: Any, **named: Any) -> Any:
        if self.is_broken:
            return None
        try:
            return look(self, *given, **named)
        except Exception:
            self.is_broken = True
            return None

    return tried


class OwnDraws:
    """Generators of the script's own, to see from which of them a loop's body draws."""

    def __init__(self) -> None:
        self.is_broken, self._before = False, list[tuple[str, str, OwnGenerators, list[Any]]]()

    @harmless
    def begin(self, frame: FrameType | None) -> None:
        """Look at them once the batch is there: what gives batches seeds those from which it draws. frame: of a call from the loop."""
        found = {id(each): (name, each) for own in own_frames(frame) for name, each in _generators(own)}
        own = [(name, type(each).__name__, OwnGenerators(each)) for name, each in found.values()]
        self._before = [(name, kind, each, each.states()) for name, kind, each in own]

    @harmless
    def drawn(self, frame: FrameType | None) -> str | None:
        """Return the first one that has drawn since `begin`, and its kind; empty if none has, or the loop seeds it itself."""
        drawn = {name: kind for name, kind, each, before in self._before if each.have_drawn(before)}
        if drawn:
            for each in own_frames(frame):
                for name in _seeded(found[0]) if (found := loop_of(each)) else ():
                    drawn.pop(name, None)
        return next((f"{name}, a {kind}" for name, kind in drawn.items()), "")


class OwnNumbers:
    """Numbers of the script's own, to see which of them a loop changes: a counter in an attribute, a best value in a global name.

    They are those of global names, of variables that an inner function assigns, and in attributes and items of what variables name.
    """

    def __init__(self) -> None:
        self.is_broken, self._before, self._compared = False, dict[str, float](), set[str]()

    @harmless
    def begin(self, frame: FrameType | None, apart: Callable[[], Collection[int]]) -> None:
        """Look at them before the first step. frame: of a call from the loop. apart: ids of objects that are saved, or set, by others."""
        self._before = {name: number for name, number, _ in _numbers(frame, apart())}

    def _is_counter(self, name: str, before: float, now: float, owner: object, frame: FrameType | None) -> bool:
        """Return whether a number that is one of the job's own counts by now is counted by its object itself; once for each."""
        if now == before or owner is None or name in self._compared:
            return False
        self._compared.add(name)
        attribute = name.rpartition(".")[2]
        return _counts(type(owner), attribute) and not _sets(frame, attribute)

    @harmless
    def changed(
        self,
        frame: FrameType | None,
        apart: Callable[[], Collection[int]],
        *,
        known: Collection[int],
        is_saved: Callable[[object], bool],
    ) -> list[str] | None:
        """Return the names of those that have changed since `begin`; those of one object once.

        known: the job's own counts, from which a number may follow. is_saved: whether a tracked object may save an object's numbers.
        """
        if not self._before:
            return []
        now = {name: (number, owner) for name, number, owner in _numbers(frame, apart())}
        found = [
            name
            for name, before in self._before.items()
            if name in now
            and (_has_changed(before, now[name][0], known) or self._is_counter(name, before, *now[name], frame))
        ]
        if found:
            saved = {name for name in found if is_saved(now[name][1])}
            owners = {name.partition(".")[0] for name in found}
            self._before = {name: each for name, each in self._before.items() if name.partition(".")[0] not in owners}
            loops = [loop[0] for each in own_frames(frame) if (loop := loop_of(each))]
            of_loops = {name for loop in loops for name in assigned([loop])}  # which `carried` looks at
            found = [name for name in found if name not in of_loops | saved]
        return found


class OwnTensors:
    """Modules and containers of tensors of the script's own that are not tracked, to see which of them a loop changes: an average, a replay buffer."""

    def __init__(self) -> None:
        self.is_broken = False
        self._before: dict[str, tuple[bool, list[Callable[[], bool]]]] = {}
        """By name, whether it is a module, and what tells whether a tensor of it, or what a container holds, has changed."""
        self._looks: dict[str, tuple[int, int]] = {}
        """The ids of what was looked at, and how often."""
        self._held: dict[int, bool] = {}

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
            if (left_in_all := left_in_all - len(named) - len(items)) < 0:
                return
            if (named or items) and id(value) not in self._held:
                self._held[id(value)] = holds(value)
            if (named or items) and not self._held[id(value)]:
                same, looks = self._looks.get(name, (0, 0))
                looks = looks + 1 if same == id(value) else 1
                self._looks[name] = id(value), looks
                self._before[name] = (
                    _is(value, nn.Module),
                    [
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


def _is_any(looks: list[Callable[[], bool]]) -> bool:
    with contextlib.suppress(Exception):  # an object that cannot be looked at hides no other
        return any(look() for look in looks)
    return False


def _is_changed(find: Found, before: Place, value: str) -> bool:
    """Return whether a tensor, which is held weakly, has another place or value; see tensor_versions.py."""
    now = find()
    return now is not None and (place(now) != before or (bool(value) and first_value(now) != value))


def _items(value: Any) -> list[int]:
    """Return the ids of a container's items, of one of many the first and last, if some hold tensors or arrays of several numbers."""
    if not _is(value, dict, list, deque) or (_is(value, dict) and len(value) > MOST):
        return []
    items = [*value.values()] if _is(value, dict) else [*value] if len(value) <= MOST else [value[0], value[-1]]
    return [*map(id, items)] if any(map(_keeps, (*items[:FEW], *items[-FEW:]))) else []


def _has_other_items(value: Any, owner: Any, name: str, before: list[int]) -> bool:
    """Return whether a container has other items, or a list in its place in `owner`: a dict may be made for each step."""
    is_kept = owner is None or _is(value, dict)
    return _items(value if is_kept else _inner(owner).get(name.rpartition(".")[2])) != before


def _keeps(item: Any, *, depth: int = 2) -> bool:
    """Return whether an item of a container is, or holds, what a step may have left: no output of a model, and no single number."""
    if _is(item, Tensor):
        return item.numel() > 1 and item.grad_fn is None
    if _is(item, np.ndarray):
        return bool(item.size > 1)
    parts = item.values() if _is(item, dict) else item if _is(item, tuple, list) else ()
    return depth > 0 and len(parts) <= FEW_PARTS and any(_keeps(each, depth=depth - 1) for each in parts)


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return stored(own_piece(tensor)).untyped_storage().data_ptr()


def _variables(frame: FrameType) -> dict[str, Any]:
    shared, own = frame.f_globals, local_names(frame.f_code)
    shared = {name: shared[name] for name in shared if name not in own} if len(shared) <= MOST_IN_ALL else {}
    return {**shared, **values_of(frame, own)}


def _named(frame: FrameType | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of variables around a loop, and of what those hold that are the script's own, each once; and what holds one."""
    seen = set[int]()
    for each in own_frames(frame):
        for name, value in _variables(each).items():
            inner = (
                {} if _is(value, nn.Module, Dataset, dict, list, deque) else _inner(value)
            )  # a data set may keep samples
            for full, part, owner in (
                (name, value, None),
                *((f"{name}.{key}", part, value) for key, part in inner.items()),
            ):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield full, part, owner


def _counts(kind: type, attribute: str) -> bool:
    """Return whether the methods of a class of the script's own count in an attribute, as by `self.n += 1`, and from a constant alone."""
    counts = False
    for each in filter(lambda each: is_of_user(each.__module__), kind.__mro__):
        with contextlib.suppress(OSError, TypeError, SyntaxError):  # without its text
            for value in _assigned(ast.parse(textwrap.dedent(inspect.getsource(each))), attribute):
                if value is None or f"self.{attribute}" in ast.unparse(value):
                    counts = True
                elif not isinstance(value, ast.Constant):  # perhaps the job's own count
                    return False
    return counts


def _assigned(tree: ast.AST, attribute: str) -> Iterator[ast.expr | None]:
    """Yield what is assigned to `self.attribute`; None for what `+=` and the like do."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        value = None if isinstance(node, ast.AugAssign) else node.value
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple):
                values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
                pairs = [*zip(target.elts, values, strict=False)]
            yield from (given for each, given in pairs if ast.unparse(each) == f"self.{attribute}")


def _sets(frame: FrameType | None, attribute: str) -> bool:
    """Return whether the text around a loop sets an attribute of this name from outside: perhaps by the job's own counts."""
    files = {each.f_code.co_filename for each in own_frames(frame)}
    set_outside = re.compile(rf"(?<!\bself)\.{re.escape(attribute)}\s*=(?!=)")
    return any(set_outside.search("".join(linecache.getlines(file))) for file in files)


def _untracked(name: str, value: Any, known: Collection[int], modules: Collection[int]) -> list[tuple[Found, Tensor]]:
    is_attribute = _is(value, Tensor) and "." in name  # one of a variable may be made for each step
    try:
        found = _tensors([value] if is_attribute else value, modules)
        return [(find, tensor) for find, tensor in found if memory_of(tensor) not in known]
    except Exception:  # as of a lazy module
        return []


def _tensors(value: Any, modules: Collection[int]) -> Iterator[tuple[Found, Tensor]]:
    """Yield what finds them again, and the parameters and buffers of a module, or the tensors of a dict or list that have several numbers.

    modules: ids of modules whose buffers are left out.
    """
    if _is(value, nn.Module):
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
    elif _is(value, dict, list) and len(value) <= MOST:
        for each in value.values() if _is(value, dict) else value:
            if _is(each, Tensor) and each.is_floating_point() and each.numel() > 1 and not each.is_inference():
                if each.grad_fn is None:  # an output of the model would hold its graph
                    yield ref(each), each


def _buffer(module: ref[nn.Module], name: str) -> Tensor | None:
    owner = module()
    return dict(owner._buffers.items()).get(name) if owner is not None else None  # TorchScript's has no get()


def _is(value: object, *kinds: type) -> bool:
    """Return whether `value` is of one of the `kinds`; unlike isinstance, this runs no code of a proxy's."""
    return issubclass(type(value), kinds)


def _has_changed(before: float, now: float, known: Collection[int]) -> bool:
    is_same = now == before or (math.isnan(now) and math.isnan(before))
    is_of_clock = isinstance(now, float) and min(abs(now - time.time()), abs(now - time.monotonic()) * DAY_S) < DAY_S
    return not (is_same or now in known or is_of_clock)


def _numbers(frame: FrameType | None, apart: Collection[int]) -> Iterator[tuple[str, float, object]]:
    """Yield the name of each number, the number, and the object that has it; None for a variable."""
    seen = {*apart}
    for each in own_frames(frame):
        shared = {*each.f_globals, *each.f_code.co_cellvars, *each.f_code.co_freevars}
        for name, value in _variables(each).items():
            if _is_number(name, value) and name in shared:
                yield name, value, None
            elif id(value) not in seen:
                seen.add(id(value))
                items = [*_inner(value).items()]
                yield from ((f"{name}.{key}", number, value) for key, number in items if _is_number(key, number))


def _is_number(name: object, value: object) -> bool:
    is_one = _is(value, int, float) and not _is(value, bool)
    return is_one and isinstance(name, str) and not any(each in name.lower() for each in TIMED)


def _inner(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, class or module of the script's own, or the items of a dict."""
    if _is(value, dict):
        return value if len(value) <= MOST else {}
    if _is(value, list):  # as one that holds a counter
        return {str(number): each for number, each in enumerate(value)} if len(value) <= FEW else {}
    if _is(value, ModuleType):
        is_plain = is_own(str(value.__dict__.get("__file__") or "<frozen"))
    else:
        kind = value if _is(value, type) else type(value)
        is_plain = kind in (Namespace, SimpleNamespace) or is_of_user(kind.__module__)
    found = _attributes(value) if is_plain else {}
    if "epoch" in found and any("set_epoch" in vars(kind) for kind in type(value).__mro__):  # which is called
        found.pop("epoch")
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object holds itself, none of many; no code of its own is run."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(found) if len(found) <= MOST else {}


def _generators(frame: FrameType) -> Iterator[tuple[str, Any]]:
    for variable, of_variable in _variables(frame).items():
        for name, value in _environments(variable, of_variable):
            is_library = _is(value, ModuleType) and not is_own(str(value.__dict__.get("__file__") or "<frozen"))
            inner = {} if is_library else _attributes(value)
            named = {name: value, **{f"{name}.{each}": there for each, there in inner.items()}}
            yield from ((full, each) for full, each in named.items() if _is(each, *KINDS) and not is_global(each))


def _environments(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, and those within it if it is an environment in its wrappers, or several: the innermost one draws."""
    for _ in range(FEW_PARTS):
        yield name, value
        inner = _attributes(value)
        several: Any = inner.get("envs")
        if _is(several, list):
            for number, each in enumerate(several[:FEW_PARTS]):
                yield from _environments(f"{name}.envs[{number}]", each)
        if "env" not in inner:
            return
        name, value = f"{name}.env", inner["env"]


def _seeded(loop: Loop) -> Iterator[str]:
    for part in parts(loop):
        function = part.func if isinstance(part, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr in ("seed", "manual_seed"):
            yield ast.unparse(function.value)
