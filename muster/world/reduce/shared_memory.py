"""All-reduce between ranks of one host in memory that all of them map; gloo would send every byte through a socket.

Each rank copies its part into its own slot, adds up one chunk of all slots in a fixed order, and copies all chunks out,
so the result is bitwise equal on every rank. With two ranks and with short vectors a second synchronization costs more
than the additions; then every rank adds up the whole vector instead, in the same order. Two sets of slots alternate, so
that no rank writes a slot that another still reads. Each rank counts its progress in a counter that only it writes, and
waits for another rank's counter with a futex: it sleeps, and regularly checks that the other rank is alive.

The memory is anonymous (memfd), so nothing remains of it when any process is killed, and /dev/shm need not be large.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from muster.errors import say
from muster.process import handle_of

if TYPE_CHECKING:
    from muster.world.group import World

SLOT_BYTES = 2 << 20  # small enough that a part stays in the CPU's cache
SETS = 2
LINE = 64  # bytes: counters in one cache line would slow each other down (false sharing)
POST = 64  # numbers that a rank shows at once
SHORT_BYTES = 256 << 10  # sum over all ranks' parts
SPIN_S = 20e-6
SLEEP_S = 0.05
FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # x86-64, where stores become visible in program order
EVERYBODY = 2**31 - 1

Rows = Sequence[Tensor]
"""One tensor for each rank, [number of its vectors, m], in the order of ranks."""


class SharedMemory:
    """Memory shared by the ranks of one host. A wait for a rank that has ended raises DistBackendError, as in torch."""

    def __init__(self, memory: mmap.mmap, pids: Sequence[int], *, rank: int):
        self.rank, self.size = rank, len(pids)
        self._memory = memory  # a tensor's view does not keep the mmap alive
        self._counters = memoryview(memory)[: LINE * self.size].cast("I")
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [start + LINE * each for each in range(self.size)]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_slots_at(self.size))
        self._slots = slots.view(SETS, self.size, SLOT_BYTES)
        self._posts = memoryview(memory)[LINE * self.size : _slots_at(self.size)].cast("d")
        self._count, self._turn, self._posted = 0, 0, 0
        self._peers = {each: handle_of(pid) for each, pid in enumerate(pids) if each != rank}
        self._poll = select.poll()
        for handle in self._peers.values():
            self._poll.register(handle, select.POLLIN)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._limit = ctypes.create_string_buffer(struct.pack("qq", 0, int(SLEEP_S * 1e9)))

    def add_up(self, vector: Tensor, *, scale: float = 1.0) -> None:
        """Replace `vector`, [n], by the sum over ranks of `vector` times `scale`. Collective."""
        ones = [1] * self.size
        if self.size > 2 and self.size * vector.nbytes > SHORT_BYTES:
            self.exchange([vector], ones, in_order, into=vector, scale=scale)
            return
        for part in _parts(vector.numel(), SLOT_BYTES // vector.element_size()):
            rows = [slot[0] for slot in self._next_slots(vector.dtype, part.stop - part.start, ones)]
            _put(vector[part], scale, rows[self.rank])
            self._meet()
            torch.add(rows[0], rows[1], out=vector[part])
            for other in rows[2:]:
                vector[part].add_(other)

    def exchange(
        self,
        mine: Sequence[Tensor],
        counts: Sequence[int],
        combine: Callable[[Rows], Any],
        *,
        into: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Combine all ranks' vectors into one, the same on every rank. Collective.

        `mine`: this rank's vectors, [n] each, of one dtype. `counts`: the number of vectors of each rank. `combine` is called with the
        same part of all vectors, and leaves the result in the first rank's first vector. `into`: [n], receives the result. `scale`:
        factor of this rank's vectors, applied first.
        """
        for part in _parts(into.numel(), SLOT_BYTES // (max(counts) * into.element_size())):
            size = part.stop - part.start
            slots = self._next_slots(into.dtype, size, counts)
            for vector, row in zip(mine, slots[self.rank], strict=True):
                _put(vector[part], scale, row)
            self._meet()
            share = -(-size // self.size)
            chunk = slice(self.rank * share, min(size, (self.rank + 1) * share))
            if chunk.start < size:
                combine([rows[:, chunk] for rows in slots])
            self._meet()
            into[part].copy_(slots[0][0])

    def post(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Post at most `POST` numbers; return a function that waits for the other ranks and returns all ranks' numbers, by rank.

        No rank may post the next but one before all have asked for these.
        """
        self._posted = (self._posted + 1) % 2**32
        number, turn = self._posted, self._posted % SETS
        for at, value in enumerate(values, self._post_at(turn, self.rank)):
            self._posts[at] = value
        self._counters[self.rank * LINE // 4 + 1] = number
        self._call(self._addresses[self.rank] + 4, FUTEX_WAKE, EVERYBODY)

        def posted() -> list[list[float]]:
            for other in self._peers:
                self._await(other, number, beside=1)
            begins = [self._post_at(turn, each) for each in range(self.size)]
            return [[*map(float, self._posts[begin : begin + len(values)])] for begin in begins]

        return posted

    def _post_at(self, turn: int, rank: int) -> int:
        return (turn * self.size + rank) * POST

    def _next_slots(self, dtype: torch.dtype, size: int, counts: Sequence[int]) -> list[Tensor]:
        self._turn = (self._turn + 1) % SETS
        slots = self._slots[self._turn].view(dtype)
        return [slot[: count * size].view(count, size) for slot, count in zip(slots, counts, strict=True)]

    def _meet(self) -> None:
        """Wait until all ranks have called this as often as this rank."""
        self._count = (self._count + 1) % 2**32
        self._counters[self.rank * LINE // 4] = self._count
        self._call(self._addresses[self.rank], FUTEX_WAKE, EVERYBODY)
        for other in self._peers:
            self._await(other, self._count)

    def _await(self, other: int, number: int, *, beside: int = 0) -> None:
        """Wait until a counter of another rank is at `number`. beside: the counter's place in the rank's line."""
        place, until = other * LINE // 4 + beside, time.perf_counter() + SPIN_S
        while (self._counters[place] - number) % 2**32 >= 2**31:
            if time.perf_counter() < until:
                continue
            seen = self._counters[place]
            if (seen - number) % 2**32 >= 2**31:
                self._call(self._addresses[other] + 4 * beside, FUTEX_WAIT, seen, self._limit)
            ended = self._ended() if time.perf_counter() > until + SLEEP_S else []
            # Read once more: a rank that has ended may have got here before, while this one did not run.
            if ended and (self._counters[place] - number) % 2**32 >= 2**31:
                raise DistBackendError(
                    f"rank {ended[0]} has ended while others waited for it in memory that they share"
                )

    def _ended(self) -> list[int]:
        """Return the ranks that have ended: a rank that is waited for may live, and have left for another one's end."""
        handles = {handle for handle, _ in self._poll.poll(0)}
        return [rank for rank, handle in self._peers.items() if handle in handles]

    def close(self) -> None:
        """Forget the other ranks. The memory is released with its tensors."""
        for handle in self._peers.values():
            os.close(handle)
        self._peers = {}

    def _call(self, address: int, operation: int, value: int, limit: Any = None) -> None:
        """futex(2); a wait returns on a wake, on the timeout or on a signal."""
        self._syscall(FUTEX, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)


def _slots_at(size: int) -> int:
    """Where the slots of `size` ranks begin: after a line of counters and the posts of each."""
    return (LINE + SETS * POST * 8) * size


def _parts(length: int, most: int) -> Iterator[slice]:
    return (slice(first, min(length, first + most)) for first in range(0, length, most))


def _put(vector: Tensor, scale: float, row: Tensor) -> None:
    torch.mul(vector, scale, out=row) if scale != 1.0 else row.copy_(vector)


def in_order(rows: Rows) -> None:
    """Add up `rows` in the order of ranks, in place into the first."""
    for other in rows[1:]:
        rows[0].add_(other)


def share_memory(world: World) -> SharedMemory | None:
    """Map memory shared by all ranks; None unless all are processes of one host and train on its CPUs. Collective."""
    if world.size == 1 or world.device.type != "cpu":
        return None
    handle = _create(world.size) if world.is_first else None
    facts = world.gather([_host(), os.getpid(), handle])
    (host, pid, first), *others = facts
    if world.is_first and world.environment.local_world_size == world.size and (why := why_none()):
        say(f"muster: gradients go through gloo: {why}")
    if host is None or first is None or any(other[0] != host for other in others):
        _close(handle)
        return None
    shared = _open(world, f"/proc/{pid}/fd/{first}", [each[1] for each in facts])
    failed = world.lowest(shared is None)  # all ranks have opened it by then
    _close(handle)
    if failed is not None and world.is_first:
        say(
            f"muster: rank {failed} may not map rank 0's memory although it is on the same host: gradients go through gloo"
        )
    return shared if failed is None else None


def why_none() -> str:
    """Return why ranks of this machine share no memory; empty if they may.

    The counters rely on stores becoming visible in program order; ARM needs a fence for that, which Python has no call for.
    """
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return ""
    return f"ranks share memory on Linux on x86-64, and this is {sys.platform} on {platform.machine()}"


def _host() -> str | None:
    """Return an id that is equal for all processes that see each other; None if such memory is not available."""
    if why_none() or not hasattr(os, "pidfd_open"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        return f"{boot}/{spaces}/{os.getuid()}"
    except OSError:
        return None


def _create(size: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        handle = os.memfd_create("muster", os.MFD_CLOEXEC)
        os.ftruncate(handle, _slots_at(size) + SETS * size * SLOT_BYTES)
        return handle
    except (OSError, AttributeError):
        return None


def _open(world: World, path: str, pids: Sequence[int]) -> SharedMemory | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return SharedMemory(mmap.mmap(handle, 0), pids, rank=world.rank)
        finally:
            os.close(handle)
    except OSError:
        return None


def _close(handle: int | None) -> None:
    if handle is not None:
        with contextlib.suppress(OSError):
            os.close(handle)
