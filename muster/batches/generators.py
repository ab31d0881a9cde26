"""The process's global random number generators, which samples may use and training must find unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from muster.batches.drawn import forget


@contextlib.contextmanager
def kept_generators(*, on_device: bool = False) -> Iterator[None]:
    """Restore the global generators on exit: a resumed run must find them unchanged.

    on_device: also restore the generator of the current CUDA device, if this process uses one.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if on_device and _uses_cuda() else None
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        forget()
        torch.set_rng_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def seed_generators(key: int, *, on_device: bool = False) -> None:
    """Seed the global generators with `key`, a 64-bit word. on_device: as for `kept_generators`."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if on_device and _uses_cuda():
        torch.cuda.manual_seed(key)


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
