"""From which generators of the script's own a loop draws: no checkpoint has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from muster.data.own_generators import KINDS, OwnGenerators, is_global
from muster.job.carried_state import Loop, loop_of, own_frames, parts
from muster.job.own_objects import attributes_of, contents, found_by, harmless, is_a, is_own_module, variables_of

MOST_WRAPPERS = 16
"""The most environments of several, and the most wrappers of one."""


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
        looked_at, self._before = self._before, []
        drawn = {name: kind for name, kind, each, before in looked_at if each.have_drawn(before)}
        if drawn:
            for each in own_frames(frame):
                for name in _seeded(found[0]) if (found := loop_of(each)) else ():
                    drawn.pop(name, None)
        return next((f"{name}, a {kind}" for name, kind in drawn.items()), "")


def _generators(frame: FrameType) -> Iterator[tuple[str, Any]]:
    seen = set[int]()
    for variable, of_variable in variables_of(frame).items():
        yield from found_by(_generators_in, variable, of_variable, seen)


def _generators_in(variable: str, of_variable: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in _environments(variable, of_variable, seen):
        is_library = is_a(value, ModuleType) and not is_own_module(value)
        inner = {} if is_library else attributes_of(value)
        named = {name: value, **{f"{name}.{each}": there for each, there in inner.items()}}
        yield from ((full, each) for full, each in named.items() if is_a(each, *KINDS) and not is_global(each))


def _environments(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a value, and those within it if it is an environment in its wrappers, or several: the innermost one draws."""
    for _ in range(MOST_WRAPPERS):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield name, value
        inner = attributes_of(value)
        several: Any = inner.get("envs")
        if is_a(several, list):
            for number, each in enumerate(contents(several)[:MOST_WRAPPERS]):
                yield from _environments(f"{name}.envs[{number}]", each, seen)
        if "env" not in inner:
            return
        name, value = f"{name}.env", inner["env"]


def _seeded(loop: Loop) -> Iterator[str]:
    for part in parts(loop):
        function = part.func if isinstance(part, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr in ("seed", "manual_seed"):
            yield ast.unparse(function.value)
