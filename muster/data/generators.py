"""The process's global random number generators, which samples may use and training must find unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from muster.data.draw_detection import ALL, NUMPY, PYTHON, TORCH, Others, Watch

CHOSEN = 2**32
"""Seeds that torch chooses, and those of a job, have 64 bits: hardly one is below this."""
FRESH: tuple[int, ...] = (623, 624)
"""Places of NumPy's generator in its words before the first draw, without a seed and with one."""


@contextlib.contextmanager
def kept_generators(*, on_device: bool = False) -> Iterator[None]:
    """Restore the global generators on exit: a resumed run must find them unchanged.

    on_device: also restore the generator of the current CUDA device, if this process uses one.
    """
    before = Watch()
    cuda = torch.cuda.get_rng_state() if on_device and _uses_cuda() else None
    try:
        yield
    finally:
        before.restore()
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def seed_generators(key: int, *, on_device: bool = False, only: Collection[str] = ALL) -> None:
    """Seed the global generators named by `only` with `key`, a 64-bit word. on_device: as for `kept_generators`."""
    if PYTHON in only:
        random.seed(key)
    if NUMPY in only:  # of the same 32 bits NumPy and torch would draw the same words
        np.random.seed(mixed(key) & 0xFFFFFFFF)
    if TORCH in only:
        torch.default_generator.manual_seed(key)
    if on_device and _uses_cuda():
        torch.cuda.manual_seed(key)


def seed_process(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def drawn_so_far() -> dict[str, Any]:
    """Return what stands for the numbers drawn in this process, of torch its seed and of NumPy a digest; nothing for a generator not drawn from.

    A process begins with random seeds. Python's generator is left out: some libraries draw from it when they are imported.
    """
    unused = torch.Generator().manual_seed(seed := torch.initial_seed())
    drawn: dict[str, Any] = {} if torch.equal(unused.get_state(), torch.get_rng_state()) else {"torch": seed}
    _, _, place, *_ = np.random.get_state(legacy=True)
    if place not in FRESH:
        drawn |= {"NumPy": state_of_generators()["numpy"]}
    return drawn


def seeded_by_script() -> int | None:
    """Return the seed that torch was given by the script; None if it has the seed of a process or a job, which are larger."""
    return seed if (seed := torch.initial_seed()) < CHOSEN else None


def drawn_from(before: Mapping[str, str]) -> bool:
    """Return True if a global generator has drawn since `state_of_generators` returned `before`."""
    now = state_of_generators()
    return any(now.get(name, state) != state for name, state in before.items())


def state_of_generators() -> dict[str, str]:
    """Return a digest of the state of each global generator, and of the current CUDA device's if it is in use."""
    _, words, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [np.asarray(words).tolist(), rest],
        "torch": torch.get_rng_state().tolist(),
        **({"cuda": torch.cuda.get_rng_state().tolist()} if _uses_cuda() else {}),
    }
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}


def key_of(*words: object) -> int:
    """Return a key for the draw that `words` name: the same on every rank and machine, at any time."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:7])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Draws:
    """Seeds the global generators in each step, so that a rank's draws are a function of seed, step and rank.

    Those of Python and NumPy take 20 microseconds to seed, and few models draw from them. Until they are first used (`used`),
    they keep one state, of seed and rank; from then on they are seeded in each step.
    """

    def __init__(self) -> None:
        self.used = False
        self._others = Others()

    def begin(self, seed: int, rank: int, *, are_restored: bool) -> None:
        """Seed the generators of Python and NumPy for the steps before they are used.

        are_restored: True if they have the states of a checkpoint, which tell whether they were used before it.
        """
        before, key = Others(), key_of(seed, rank)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        self._others = Others()
        self.used = self.used or (are_restored and before != self._others)
        if self.used:  # a checkpoint that is saved before the next draw then tells so
            random.random()
            np.random.random()

    def are_used(self) -> bool:
        self.used = self.used or self._others.have_drawn()
        return self.used

    def seed(self, seed: int, step: int, rank: int) -> None:
        key = (seed * 1_000_003 + rank) * 2**31 + step
        if self.are_used():
            other = key_of(key)
            random.seed(other)
            np.random.seed(other & 0xFFFFFFFF)
        torch.default_generator.manual_seed(mixed(key))
        if _uses_cuda():
            torch.cuda.manual_seed(mixed(key))


def mixed(key: int) -> int:
    """Return a 64-bit word for `key`, in a quarter of the time that a digest takes (the finalizer of splitmix64).

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    key = (key ^ (key >> 64)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return key ^ (key >> 31)
