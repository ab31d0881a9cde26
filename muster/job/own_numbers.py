"""Which numbers of the script's own a loop changes, and no checkpoint has: a counter in an attribute, a best value in a global name."""

from __future__ import annotations

import ast
import linecache
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch import nn

from muster.job.carried_state import assigned, loop_of, own_frames
from muster.job.own_objects import MOST, assigned_in, attributes_of, harmless, held_by, is_a, reads_itself, variables_of

TIMED = ("time", "elapsed", "second", "duration", "clock")
"""What names of numbers have in them that follow a clock."""
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
            self._modules -= {id(owner) for name, (_, owner) in now.items() if name.partition(".")[0] in owners}
        new = {name: number for name, (number, owner) in now.items() if id(owner) in self._modules}
        self._before = {**new, **self._before}
        return found


def _has_changed(before: float, now: float, known: Collection[int]) -> bool:
    is_same = now == before or (math.isnan(now) and math.isnan(before))
    is_of_clock = isinstance(now, float) and min(abs(now - time.time()), abs(now - time.monotonic()) * DAY_S) < DAY_S
    return not (is_same or now in known or is_of_clock)


def _numbers(frame: FrameType | None, apart: Collection[int]) -> Iterator[tuple[str, float, object]]:
    """Yield the name of each number, the number, and the object that has it; None for a variable."""
    for each in own_frames(frame):
        shared = {*each.f_globals, *each.f_code.co_cellvars, *each.f_code.co_freevars}
        variables = variables_of(each).items()
        yield from ((name, value, None) for name, value in variables if _is_number(name, value) and name in shared)
    for name, owner in _owners(frame, apart):
        items = held_by(owner) or (_added(owner) if is_a(owner, nn.Module) else {})
        yield from ((f"{name}.{key}", number, owner) for key, number in items.items() if _is_number(key, number))


def _owners(frame: FrameType | None, apart: Collection[int]) -> Iterator[tuple[str, object]]:
    """Yield the values of the variables around a loop, and the parts of modules, each once."""
    seen = {*apart}
    for each in own_frames(frame):
        for name, value in variables_of(each).items():
            parts = value.named_modules() if is_a(value, nn.Module) else [("", value)]
            for path, part in islice(parts, MOST):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield f"{name}.{path}".rstrip("."), part


def _added(module: object) -> dict[str, Any]:
    """Return the attributes of a module of torch's that a script may have set; options such as a dropout's `p` follow from a step mostly."""
    options = getattr(type(module), "__constants__", ())
    return {name: each for name, each in attributes_of(module).items() if name[:1] != "_" and name not in options}


def _is_number(name: object, value: object) -> bool:
    is_one = is_a(value, int, float) and not is_a(value, bool)
    return is_one and isinstance(name, str) and not any(each in name.lower() for each in TIMED)


def _counts(kind: type, attribute: str) -> bool:
    """Return whether the methods of a class of the script's own count in an attribute, as by `self.n += 1`, and from a constant alone."""
    values = assigned_in(kind).get(f"self.{attribute}", [])
    counts = [value for value in values if reads_itself(value, attribute)]
    return bool(counts) and all(isinstance(each, ast.Constant) for each in values if each not in counts)


def _sets(frame: FrameType | None, attribute: str) -> bool:
    """Return whether the text around a loop sets an attribute of this name from outside: perhaps by the job's own counts."""
    files = {each.f_code.co_filename for each in own_frames(frame)}
    set_outside = re.compile(rf"(?<!\bself)\.{re.escape(attribute)}\s*=(?!=)")
    return any(set_outside.search("".join(linecache.getlines(file))) for file in files)
