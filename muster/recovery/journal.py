"""Memory of a rank that outlives it: its supervisor maps it, and the process that replaces the rank reads it.

A rank notes what only it knows, before its part of a step's sum leaves it: so whatever step the survivors have complete,
the journal of the dead rank has its own part of that step. Of the last steps the oldest one is overwritten.
"""

from __future__ import annotations

import marshal
import mmap
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muster.tensor_bytes import as_bytes

SLOT_BYTES = 64 << 20
HEAD_BYTES = 24  # three words: 1 if what follows is complete, step, bytes of the facts
ALIGN = 64
BASE = 4096
OVER, LAUNCH, WHOLE, LATE, NOTED_AT, HANG, END = 0, 8, 64, 72, 80, 128, 640  # offsets in the first page


class StepJournal:
    """One rank's journal of the `last` steps. Untouched pages cost no memory. Raises OSError: the system has no memory for it."""

    def __init__(self, *, last: int = 2) -> None:
        self._last = last
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, BASE + last * SLOT_BYTES, flags=flags)
        self._array = np.frombuffer(self._memory, dtype=np.uint8)
        self._words = memoryview(self._memory).cast("q")

    @property
    def launch(self) -> str:
        """The first attempt of the launch in which the rank has met the others; empty before."""
        return bytes(self._memory[LAUNCH:WHOLE]).rstrip(b"\0").decode()

    @launch.setter
    def launch(self, attempt: str) -> None:
        self._memory[LAUNCH:WHOLE] = attempt.encode().ljust(WHOLE - LAUNCH, b"\0")

    @property
    def is_over(self) -> bool:
        """True once the ranks are about to end together: the process is not restarted in place."""
        return self._memory[OVER] == 1

    def end(self) -> None:
        self._memory[OVER] = 1

    @property
    def whole(self) -> int:
        """The steps that this rank has done. The supervisor compares it: has a rank died twice at one step?"""
        return self._words[WHOLE // 8]

    @whole.setter
    def whole(self, steps: int) -> None:
        self._words[WHOLE // 8], self._words[NOTED_AT // 8] = steps, time.monotonic_ns()

    @property
    def silent_s(self) -> float:
        """Seconds since the rank has ended its last step; 0 before the first."""
        noted_at = self._words[NOTED_AT // 8]
        return (time.monotonic_ns() - noted_at) / 1e9 if noted_at else 0.0

    @property
    def changes_late(self) -> bool:
        """Whether the rank has ever changed its buffers between the last note in a step and the end of that step."""
        return self._memory[LATE] == 1

    def note_late_change(self) -> None:
        self._memory[LATE] = 1

    @property
    def hang(self) -> str:
        """Where the rank's code stood when it ended itself for a hang; empty if it has not, or if its supervisor knows."""
        return bytes(self._memory[HANG:END]).rstrip(b"\0").decode(errors="ignore")

    @hang.setter
    def hang(self, place: str) -> None:
        self._memory[HANG:END] = place.encode()[: END - HANG].ljust(END - HANG, b"\0")

    def write(self, step: int, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Note `facts` (JSON values) and `tensors` (on the CPU) of `step`. Raises ValueError: they are larger than `SLOT_BYTES`."""
        shapes = [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()]
        values: Any = (facts, shapes)
        text = marshal.dumps(values)  # the reader is a fork of the same process
        begin = self._at(step)
        if tensors and len(text) + sum(each.nbytes + 2 * ALIGN for each in tensors.values()) > SLOT_BYTES:
            raise ValueError(f"more than {SLOT_BYTES >> 20} MiB")
        head = begin // 8
        self._words[head] = 0  # not valid while it is written
        self._words[head + 1] = step
        self._words[head + 2] = len(text)
        at = begin + HEAD_BYTES
        self._memory[at : at + len(text)] = text
        at = _aligned(at + len(text))
        for tensor in tensors.values():
            if tensor.nbytes:
                self._array[at : at + tensor.nbytes] = as_bytes(tensor.detach())
            at = _aligned(at + tensor.nbytes)
        self._words[head] = 1

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return copies of the facts and tensors of `step`; None if they are not there."""
        at = self._at(step)
        is_valid, noted, length = self._words[at // 8 : at // 8 + 3]
        if not is_valid or noted != step:
            return None
        at += HEAD_BYTES
        facts, shapes = marshal.loads(bytes(self._memory[at : at + length]))
        at = _aligned(at + length)
        tensors = {}
        for name, kind, shape in shapes:
            empty = torch.empty(shape, dtype=getattr(torch, kind))
            if empty.nbytes:
                empty.view(-1).view(torch.uint8).numpy()[:] = self._array[at : at + empty.nbytes]
            tensors[name] = empty
            at = _aligned(at + empty.nbytes)
        return facts, tensors

    def is_torn(self, step: int) -> bool:
        """Return whether the note of `step` was begun and not finished."""
        at = self._at(step) // 8
        return not self._words[at] and self._words[at + 1] == step

    def _at(self, step: int) -> int:
        return BASE + step % self._last * SLOT_BYTES


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
