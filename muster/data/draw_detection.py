"""Whether code has drawn from the process's global random number generators, found out in some microseconds.

A comparison of `random.getstate()` and `np.random.get_state()` costs as much as reading a small batch, because both make
new objects of 624 words. The words themselves are compared here, where they lie in memory: NumPy documents the address
(`BitGenerator.ctypes.state_address`); that of Python's generator is tried once against `getstate()`, and not used if it
differs.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np
import torch

WORDS = 624
BYTES = 4 * (WORDS + 1)
"""Size of a Mersenne Twister: its words, and the position of the next one (before them in Python, after them in NumPy)."""

PYTHON, NUMPY, TORCH = "python", "numpy", "torch"
ALL = frozenset({PYTHON, NUMPY, TORCH})
"""The global generators."""

OF_STATES = (
    (random, "getstate"), (random, "setstate"), (np.random, "get_state"), (np.random, "set_state"),
    (torch, "get_rng_state"), (torch, "set_rng_state"), (torch, "initial_seed"),
    (torch.random, "get_rng_state"), (torch.random, "set_rng_state"), (torch.random, "initial_seed"),
)  # fmt: skip
"""Functions that give or set the state of a global generator."""
_looking = threading.Lock()
_generator: Any = random.getstate.__self__  # type: ignore[attr-defined]

OTHER = "other"
"""Kind of a generator that `np.random.set_bit_generator` has put in the place of NumPy's Mersenne Twister."""


class Watch:
    """The states of the generators of Python, NumPy and torch when it was created."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = _python(), _numpy(), torch.default_generator.get_state()
        self._other = np.random.get_state(legacy=False) if self._numpy[0] == OTHER else None

    def drawn(self) -> frozenset[str]:
        """Return the generators of `ALL` whose state has changed since: something has drawn from them, or seeded them."""
        changed = {
            TORCH: not torch.equal(torch.default_generator.get_state(), self._torch),
            PYTHON: _python() != self._python,
            NUMPY: _numpy() != self._numpy,
        }
        return frozenset(name for name, is_so in changed.items() if is_so)

    def restore(self) -> None:
        changed = self.drawn()
        if PYTHON in changed:
            words, gauss = self._python
            numbers = np.frombuffer(words, np.uint32).tolist() if isinstance(words, bytes) else None
            random.setstate((random.Random.VERSION, (*numbers[1:], numbers[0]), gauss) if numbers else words)
        if NUMPY in changed:
            kind, content, *cached = self._numpy
            if self._other is None:
                whole = np.frombuffer(content, np.uint32)
                np.random.set_state((kind, whole[:WORDS], int(whole[WORDS]), *cached))
            else:
                np.random.set_state(self._other)
            forget()
        if TORCH in changed:
            torch.default_generator.set_state(self._torch)


class Looks:
    """A context manager that sets `seen` if this thread reads or sets the state of a global generator.

    Such code may put the state back, as `torch.random.fork_rng` does, or make a generator of its own from it: then its draws
    depend on a state that has not changed. Only calls of the functions as attributes of their modules are seen. Within another
    Looks, also of another thread or of the process that has forked this one, nothing can be told, and `seen` is True.
    """

    def __init__(self) -> None:
        self.seen = self._can = False
        self._thread, self._kept = threading.get_ident(), list[Callable[..., Any]]()

    def __enter__(self) -> Self:
        self._can = _looking.acquire(blocking=False)
        self.seen = not self._can
        if self._can:
            self._kept = [getattr(module, name) for module, name in OF_STATES]
            for (module, name), function in zip(OF_STATES, self._kept, strict=True):
                setattr(module, name, partial(self._note, function))
        return self

    def __exit__(self, *_: object) -> None:
        if self._can:
            for (module, name), function in zip(OF_STATES, self._kept, strict=True):
                setattr(module, name, function)
            _looking.release()

    def _note(self, function: Callable[..., Any], /, *args: Any, **values: Any) -> Any:
        self.seen = self.seen or threading.get_ident() == self._thread
        return function(*args, **values)


class Others:
    """The states of the generators of Python and NumPy when it was created.

    A draw changes the position in the words, or, if it is a multiple of all words, the words.
    """

    def __init__(self) -> None:
        self._states = _python(), _numpy()
        self._kind = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._places: list[Any] = []
        if _of_python is not None and self._states[1][0] == "MT19937":
            python, numpy = _of_python, self._kind.ctypes.state_address
            places = (python, python + 4, numpy, numpy + 4 * WORDS)
            self._places = [ctypes.c_uint32.from_address(place) for place in places]
        self._values = [place.value for place in self._places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Others) and other._states == self._states

    def have_drawn(self) -> bool:
        if self._places and np.random.get_bit_generator() is self._kind:  # type: ignore[attr-defined]
            return [place.value for place in self._places] != self._values
        return (_python(), _numpy()) != self._states


def forget() -> None:
    """Take notice that the state of NumPy's generator was set."""
    global _seen
    _seen = b"", True


def _address_of_python() -> int | None:
    """Return the address of the position and words of `random`'s generator; None if it is not where it is expected."""
    if type(_generator).__basicsize__ < object.__basicsize__ + BYTES:
        return None
    address = id(_generator) + object.__basicsize__
    *words, position = _generator.getstate()[1]
    return (
        address if np.frombuffer(ctypes.string_at(address, BYTES), np.uint32).tolist() == [position, *words] else None
    )


_of_python = _address_of_python()
_seen: tuple[bytes, bool] = (b"", True)
"""The last words of NumPy's generator, and True if it might then have kept the second of two normal numbers."""


def _python() -> tuple[Any, Any]:
    """Return (words, the second of two normal numbers, if one is kept)."""
    if _of_python is None:
        return random.getstate(), None
    return ctypes.string_at(_of_python, BYTES), _generator.gauss_next


def _numpy() -> tuple[Any, ...]:
    """Return (kind, words and position, is a normal number kept, which).

    A kept number may be used up without a change of the words. One is kept only after a draw, which changes them: while
    they are unchanged since none was kept, none is, unless the state was set (`forget`).
    """
    global _seen
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is np.random.MT19937:
        words = ctypes.string_at(generator.ctypes.state_address, BYTES)
        if _seen == (words, False):
            return "MT19937", words, 0, 0.0
        kind, _, _, is_supervised, kept = np.random.get_state()
        _seen = words, bool(is_supervised)
        return kind, words, is_supervised, kept
    return OTHER, repr(np.random.get_state(legacy=False)), 0, 0.0
