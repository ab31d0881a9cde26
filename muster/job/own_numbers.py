"""Which numbers of the script's own a loop changes, and no checkpoint has: a counter in an attribute, a best value in a global name."""

from __future__ import annotations

import ast
import linecache
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from muster.job.carried_state import assigned, loop_of, own_frames
from muster.job.own_objects import (
    MOST,
    assigned_in,
    attributes_of,
    found_by,
    harmless,
    held_by,
    is_a,
    reads_itself,
    variables_of,
)

TIMED = {
    "time",
    "times",
    "timer",
    "runtime",
    "walltime",
    "elapsed",
    "sec",
    "secs",
    "seconds",
    "duration",
    "clock",
    "eta",
}
"""Words in names of numbers that follow a clock."""
KEPT = {"best", "lowest", "highest", "avg", "average", "mean", "sum", "count", "counter"}
"""Words in names of numbers that go on from step to step, as in a library's meter or early stopping."""
WORD = re.compile(r"[A-Z]?[a-z]+")
DAY_S = 86_400.0


class OwnNumbers:
    """Numbers of the script's own, to see which of them a loop changes: a counter in an attribute, a best value in a global name.

    They are those of global names, of variables that an inner function assigns, and in attributes and items of what variables name.
    """

    def __init__(self) -> None:
        self.is_broken, self._before, self._compared = False, dict[str, float](), set[str]()
        self._modules = set[int]()
        """The ids of the modules that there were at first: one may get a number later, and seldom one that each step sets anew."""

    @harmless
    def begin(self, frame: FrameType | None, apart: Callable[[], Collection[int]]) -> None:
        """Look at them before the first step. frame: of a call from the loop. apart: ids of objects that are saved, or set, by others."""
        self._before = {name: number for name, number, _ in _numbers(frame, apart())}
        self._modules = {id(owner) for _, owner in _owners(frame, apart()) if is_a(owner, nn.Module)}

    def _is_counter(self, name: str, before: float, now: float, owner: object, frame: FrameType | None) -> bool:
        """Return whether a number that is one of the job's own counts by now is counted by its object or the text itself; once for each."""
        if now == before or name in self._compared:
            return False
        self._compared.add(name)
        attribute = name.rpartition(".")[2]
        if owner is not None and _counts(type(owner), attribute) and not _sets(frame, attribute):
            return True
        named = rf"(?<![\w.]){re.escape(name)}\s*"
        return _is_in_text(frame, rf"{named}\+=") and not _is_in_text(frame, rf"{named}=(?!=)\s*[^-\d\s]")

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
        now = {name: (number, owner) for name, number, owner in _numbers(frame, apart())}
        found = [
            name
            for name, before in self._before.items()
            if name in now
            and (_has_changed(before, now[name][0], known) or self._is_counter(name, before, *now[name], frame))
            and not (is_a(now[name][0], bool) and not _is_own_flag(name, now[name][1], frame))
        ]
        if found:
            saved = {name for name in found if is_saved(now[name][1])}
            owners = {name.partition(".")[0] for name in found}
            self._before = {name: each for name, each in self._before.items() if name.partition(".")[0] not in owners}
            loops = [loop[0] for each in own_frames(frame) if (loop := loop_of(each))]
            of_loops = {name for loop in loops for name in assigned([loop])}  # which `carried` looks at
            made = {name for name in found if is_a(now[name][1], list) and name.partition(".")[0] in of_loops}
            found = [name for name in found if name not in of_loops | saved | made]
            self._modules -= {id(owner) for name, (_, owner) in now.items() if name.partition(".")[0] in owners}
        new = {name: number for name, (number, owner) in now.items() if id(owner) in self._modules}
        self._before = {**new, **self._before}
        return found


def _has_changed(before: float, now: float, known: Collection[int]) -> bool:
    is_same = now == before or (math.isnan(now) and math.isnan(before))
    is_of_clock = is_a(now, float) and min(abs(now - time.time()), abs(now - time.monotonic()) * DAY_S) < DAY_S
    return not (is_same or (now in known and not is_a(now, bool)) or is_of_clock)


def _numbers(frame: FrameType | None, apart: Collection[int]) -> Iterator[tuple[str, float, object]]:
    """Yield the name of each number, the number, and the object that has it; None for a variable."""
    for each in own_frames(frame):
        shared = {*each.f_globals, *each.f_code.co_cellvars, *each.f_code.co_freevars}
        variables = variables_of(each).items()
        yield from ((name, value, None) for name, value in variables if _is_number(name, value) and name in shared)
    for name, owner in _owners(frame, apart):
        yield from found_by(_of_owner, name, owner)


def _of_owner(name: str, owner: object) -> Iterator[tuple[str, float, object]]:
    items, is_module = held_by(owner), is_a(owner, nn.Module)
    flags = (
        {key for key in items if key != "training"} if is_module else ()
    )  # as of a layer that initializes itself once
    for key, number in (items or (_added(owner) if is_module else _kept_by(owner))).items():
        if is_a(key, str) and _is_number(f"{name}.{key}", number, or_flag=key in flags):
            yield f"{name}.{key}", number, owner
        elif number is None and is_a(key, str) and _has_word(key, KEPT) and not is_a(owner, dict, list):
            yield f"{name}.{key}", math.nan, owner  # a best value that there is none of yet


def _owners(frame: FrameType | None, apart: Collection[int]) -> Iterator[tuple[str, object]]:
    """Yield the values of the variables around a loop, and the parts of modules, each once."""
    seen = {*apart}
    for each in own_frames(frame):
        for name, value in variables_of(each).items():
            for path, part in found_by(_modules, value) if is_a(value, nn.Module) else [("", value)]:
                if id(part) not in seen:
                    seen.add(id(part))
                    yield f"{name}.{path}".rstrip("."), part


def _modules(module: Any) -> Iterator[tuple[str, Any]]:
    return islice(module.named_modules(), MOST)


def _added(module: object) -> dict[str, Any]:
    """Return the attributes of a module of torch's that a script may have set; options such as a dropout's `p` follow from a step mostly."""
    options = getattr(type(module), "__constants__", ())
    return {name: each for name, each in attributes_of(module).items() if name[:1] != "_" and name not in options}


def _kept_by(thing: object) -> dict[str, Any]:
    """Return what an object of a library keeps from step to step, as its names say: none of torch's, and of nothing that is iterated or entered, as a progress bar."""
    kind = type(thing)
    is_apart = kind.__module__.partition(".")[0] in ("torch", "muster") or is_a(thing, type, ModuleType)
    if is_apart or hasattr(kind, "__iter__") or hasattr(kind, "__enter__"):
        return {}
    return {name: each for name, each in attributes_of(thing).items() if _has_word(name, KEPT)}


def _has_word(name: str, words: set[str]) -> bool:
    return not words.isdisjoint(map(str.lower, WORD.findall(name)))


def _is_number(name: str, value: object, *, or_flag: bool = False) -> bool:
    is_one = or_flag if is_a(value, bool) else is_a(value, int, float, np.integer, np.floating)
    return is_one and not is_timed(name)


def is_timed(name: str) -> bool:
    """Return whether a name says that its numbers follow a clock."""
    return _has_word(name, TIMED)


def _counts(kind: type, attribute: str) -> bool:
    """Return whether the methods of a class of the script's own count in an attribute, as by `self.n += 1`, and from a constant alone."""
    values = assigned_in(kind).get(f"self.{attribute}", [])
    counts = [value for value in values if reads_itself(value, attribute)]
    return bool(counts) and all(isinstance(each, ast.Constant) for each in values if each not in counts)


def _is_own_flag(name: str, owner: object, frame: FrameType | None) -> bool:
    """Return whether a module's own methods set a flag, and to constants, as one that initializes itself once."""
    kind: Any = type(owner)
    attribute = name.rpartition(".")[2]
    values = assigned_in(kind).get(f"self.{attribute}", [])
    return all(isinstance(each, ast.Constant) for each in values) and len(values) > 1 and not _sets(frame, attribute)


def _sets(frame: FrameType | None, attribute: str) -> bool:
    """Return whether the text around a loop sets an attribute of this name from outside: perhaps by the job's own counts."""
    return _is_in_text(frame, rf"(?<!\bself)\.{re.escape(attribute)}\s*=(?!=)")


def _is_in_text(frame: FrameType | None, pattern: str) -> bool:
    files = {each.f_code.co_filename for each in own_frames(frame)}
    return any(re.search(pattern, "".join(linecache.getlines(file))) for file in files)
