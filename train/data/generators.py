"""The process's global random number generators, which samples may use and training has to find untouched."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the global generators as they were: a resumed run has to find them untouched."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_generators(key: int) -> None:
    """Make all that a sample draws a function of `key`, a 64-bit word."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
