"""What the variables of a script's own functions name around its loop: the values, and what those hold that are the script's own.

Only values are looked at: nothing is attached to the objects, and no code of their own is run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

from muster.code_location import is_own
from muster.data.own_generators import is_of_user
from muster.job.carried_state import local_names, values_of

MOST, MOST_IN_ALL = 1_000, 5_000
"""The most items of a container that is looked at, and the most global names, and tensors, in all."""
FEW = 4
"""The most items of a list of numbers that is looked at, and of a long container's beginning and end."""


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


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the values of a function's variables and of its module's, by name."""
    shared, own = frame.f_globals, local_names(frame.f_code)
    shared = {name: shared[name] for name in shared if name not in own} if len(shared) <= MOST_IN_ALL else {}
    return {**shared, **values_of(frame, own)}


def held_by(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, class or module of the script's own, or the items of a dict."""
    if is_a(value, dict):
        return dict(dict.items(value)) if dict.__len__(value) <= MOST else {}
    if is_a(value, list):  # as one that holds a counter
        return {str(number): each for number, each in enumerate(contents(value))} if list.__len__(value) <= FEW else {}
    if is_a(value, ModuleType):
        is_plain = is_own_module(value)
    else:
        kind = value if is_a(value, type) else type(value)
        is_plain = kind in (Namespace, SimpleNamespace) or is_of_user(kind.__module__)
    found = attributes_of(value) if is_plain else {}
    if "epoch" in found and any("set_epoch" in vars(kind) for kind in type(value).__mro__):  # which is called
        found.pop("epoch")
    return found


def contents(value: Any) -> list[Any]:
    """Return the items of a list, tuple or deque, of one of many the first and last, or the values of a dict of few; no code of its own is run."""
    if is_a(value, dict):
        return [*dict.values(value)] if dict.__len__(value) <= MOST else []
    kind: Any = next((each for each in (list, tuple, deque) if is_a(value, each)), None)
    if kind is None:
        return []
    number = kind.__len__(value)
    return [*kind.__iter__(value)] if number <= MOST else [kind.__getitem__(value, 0), kind.__getitem__(value, -1)]


def found_by(look: Callable[..., Iterable[Any]], *given: Any) -> list[Any]:
    """Return what a look at one object yields; nothing if it cannot be looked at: it hides no other."""
    with contextlib.suppress(Exception):
        return [*look(*given)]
    return []


def is_own_module(module: ModuleType) -> bool:
    return is_own(str(module.__dict__.get("__file__") or "<frozen"))


def attributes_of(value: Any, *, most: int = MOST) -> dict[str, Any]:
    """Return the attributes that an object holds itself, none of more than `most`; no code of its own is run."""
    found = dict[str, Any]()
    with contextlib.suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if is_a(slots, str) else slots:
            slot: Any = vars(kind).get(name)
            if is_a(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    found[name] = slot.__get__(value)
    return found if len(found) <= most else {}


def is_a(value: object, *kinds: type) -> bool:
    """Return whether `value` is of one of the `kinds`; unlike isinstance, this runs no code of a proxy's."""
    return issubclass(type(value), kinds)


@functools.lru_cache(maxsize=MOST)
def assigned_in(kind: type) -> dict[str, list[ast.expr | None]]:
    """Return what the methods of a class of the script's own assign, by target, as `self.n`; None for what `+=` and the like do."""
    found = defaultdict[str, list[ast.expr | None]](list)
    for each in filter(lambda each: is_of_user(each.__module__), kind.__mro__):
        with contextlib.suppress(OSError, TypeError, SyntaxError):  # without its text
            for target, value in _assigned(ast.parse(textwrap.dedent(inspect.getsource(each)))):
                found[ast.unparse(target)].append(value)
    return dict(found)


def reads_itself(value: ast.expr | None, attribute: str) -> bool:
    """Return whether what is assigned to `self.attribute` depends on what it was."""
    return value is None or any(
        isinstance(part, ast.Attribute) and part.attr == attribute and ast.unparse(part.value) == "self"
        for part in ast.walk(value)
    )


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        value = None if isinstance(node, ast.AugAssign) else node.value
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple):
                values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
                yield from zip(target.elts, values, strict=False)
            else:
                yield target, value
