"""Memory of a rank that outlives it: its keeper maps it, and the process that is born in the rank's place reads it.

A rank notes what only it knows, before its part of a step's sum leaves it: so whatever step the survivors have complete,
the notes of the dead rank have its own part of that step. Of two steps the older one is overwritten.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SLOT_BYTES = 64 << 20
MODULES_BYTES = 1 << 20
HEAD = struct.Struct("qqq")  # serial number (0: being written), step, bytes of the JSON part
ALIGN = 64
BASE = 4096
OVER, LAUNCH, STEP = 0, 8, 64  # offsets in the first page


class Notes:
    """One rank's notes. Pages that are never touched cost no memory.

    Raises:
        OSError: the system does not give the memory.
    """

    def __init__(self) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, BASE + MODULES_BYTES + 2 * SLOT_BYTES, flags=flags)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._serial = 0

    @property
    def launch(self) -> str:
        """The first attempt of the launch in which the rank has met the others; empty before."""
        return bytes(self._memory[LAUNCH:STEP]).rstrip(b"\0").decode()

    @launch.setter
    def launch(self, attempt: str) -> None:
        self._memory[LAUNCH:STEP] = attempt.encode().ljust(STEP - LAUNCH, b"\0")

    @property
    def is_over(self) -> bool:
        """True once the ranks are about to end together: the process is not born again."""
        return self._memory[OVER] == 1

    def end(self) -> None:
        """Note that the ranks are about to end together."""
        self._memory[OVER] = 1

    @property
    def step(self) -> int:
        """The last step that is noted."""
        return int(struct.unpack_from("q", self._memory, STEP)[0])

    @property
    def modules(self) -> list[str]:
        """Names of the modules that the rank had imported when it began to train; empty before."""
        (length,) = struct.unpack_from("q", self._memory, BASE)
        return bytes(self._memory[BASE + 8 : BASE + 8 + length]).decode().split() if length else []

    @modules.setter
    def modules(self, names: list[str]) -> None:
        text = " ".join(names).encode()[: MODULES_BYTES - 8]
        self._memory[BASE + 8 : BASE + 8 + len(text)] = text
        struct.pack_into("q", self._memory, BASE, len(text))

    def write(self, step: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Note `facts` (JSON) and `tensors` (on the CPU) of `step`.

        Raises:
            ValueError: they are larger than `SLOT_BYTES`.
        """
        shapes = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
        text = json.dumps([facts, shapes]).encode()
        at = begin = self._at(step % 2)
        if HEAD.size + len(text) + sum(each.nbytes + ALIGN for each in tensors.values()) > SLOT_BYTES - ALIGN:
            raise ValueError(f"more than {SLOT_BYTES >> 20} MiB")
        self._serial += 1
        HEAD.pack_into(self._memory, begin, 0, step, len(text))
        at += HEAD.size
        self._memory[at : at + len(text)] = text
        at = _aligned(at + len(text))
        for tensor in tensors.values():
            if tensor.nbytes:
                room = self._bytes[at : at + tensor.nbytes].view(tensor.dtype)
                room.copy_(tensor.detach().reshape(-1))
            at = _aligned(at + tensor.nbytes)
        HEAD.pack_into(self._memory, begin, self._serial, step, len(text))
        struct.pack_into("q", self._memory, STEP, step)

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return copies of the facts and tensors of `step`; None if they are not there."""
        at = self._at(step % 2)
        serial, noted, length = HEAD.unpack_from(self._memory, at)
        if not serial or noted != step:
            return None
        at += HEAD.size
        facts, shapes = json.loads(bytes(self._memory[at : at + length]))
        at = _aligned(at + length)
        tensors = {}
        for name, kind, shape in shapes:
            empty = torch.empty(shape, dtype=getattr(torch, kind))
            if empty.nbytes:
                empty.view(-1).copy_(self._bytes[at : at + empty.nbytes].view(empty.dtype))
            tensors[name] = empty
            at = _aligned(at + empty.nbytes)
        return facts, tensors

    @staticmethod
    def _at(number: int) -> int:
        return BASE + MODULES_BYTES + number * SLOT_BYTES


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
