"""Generators that a data set or its functions hold themselves; samples may draw from them as from the global ones."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from muster.code_location import is_own
from muster.data.generators import mixed

MOST, MOST_OF_ONE = 10_000, 1_000
"""Objects that are looked at in all, and in one container: generators lie near the top."""
LOOKS = 4
"""How often they are looked for: the first samples may create them."""
KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, types.ModuleType)


class OwnGenerators:
    """The generators within `roots`: in attributes, containers and closures, and the globals that their code names."""

    def __init__(self, *roots: Any):
        self._roots, self._found, self._looks = roots, list[Any](), 0

    def seed(self, key: int) -> None:
        """Seed them with `key`, a 64-bit word, each in its own way."""
        if not self._looks:
            self._look()
        for number, each in enumerate(self._found):
            seed_one(each, key ^ (number + 1) << 32)

    def states(self) -> list[Any]:
        if self._looks < LOOKS:
            self._look()
        return [*map(_state, self._found)]

    def have_drawn(self, before: list[Any]) -> bool:
        """Return True if there are others than at `states()`, or one has another state."""
        return [*map(_plain, self.states())] != [*map(_plain, before)]

    def restore(self, before: list[Any]) -> None:
        """Bring them back into the states that `states()` returned: only samples draw from seeded ones."""
        for each, state in zip(self._found, before, strict=False):
            _set_state(each, state)

    def _look(self) -> None:
        self._looks, self._found = self._looks + 1, [*_generators_in(self._roots)]


def seed_one(generator: Any, key: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(mixed(key))  # on the CPU its lower 32 bits count alone
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(key).state
    else:
        generator.seed((key ^ key >> 32) % 2**32)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _plain(state: Any) -> Any:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)


def _generators_in(roots: tuple[Any, ...]) -> Iterator[Any]:
    waiting, seen = deque(roots), set[int]()
    for _ in range(MOST):
        while waiting and (isinstance(waiting[0], PLAIN) or id(waiting[0]) in seen):
            waiting.popleft()
        if not waiting:
            return
        each = waiting.popleft()
        seen.add(id(each))
        if isinstance(each, KINDS):
            if not is_global(each):
                yield each
        else:
            waiting.extend(islice(_within(each), MOST_OF_ONE))


def is_global(generator: Any) -> bool:
    """Return True for a generator that is seeded anyway, or cannot be."""
    return isinstance(generator, random.SystemRandom) or any(each is generator for each in _global())


def _global() -> tuple[Any, ...]:
    hidden: Any = np.random.mtrand
    return random.getstate.__self__, hidden._rand, torch.default_generator  # type: ignore[attr-defined]


def _within(value: Any) -> Iterator[Any]:
    """Yield what an object refers to, as far as its samples may depend on it."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    else:
        yield from [*getattr(value, "__dict__", {}).values()]
        for kind in value.__mro__ if isinstance(value, type) else type(value).__mro__:
            if is_of_user(kind.__module__):
                yield from [*vars(kind).values()]


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if is_of_user(function.__module__):
        yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def is_of_user(module: str | None) -> bool:
    """Return True if the module of this name is user code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and is_own(file)
