"""The process's global random number generators, which samples may use and training has to find untouched."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_generators(*, on_device: bool = False) -> Iterator[None]:
    """Leave the global generators as they were: a resumed run has to find them untouched.

    on_device: the current CUDA device's, too, where this process uses one.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if on_device and _uses_cuda() else None
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def seed_generators(key: int, *, on_device: bool = False) -> None:
    """Make all that is drawn from here on a function of `key`, a 64-bit word. on_device: as for `kept_generators`."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if on_device and _uses_cuda():
        torch.cuda.manual_seed(key)


def key_of(*words: object) -> int:
    """A key of what names a draw: the same on every rank, machine and day."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:7])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
