"""Memory that the ranks of one node map, so that one of them at a time talks to the rendezvous store for all.

Each rank writes its heartbeat into a slot of its own. Whichever rank first finds that the node's last post is old enough
claims the next one, by writing the time, and posts all slots under one key. So there is no leader to elect or to lose: if
the rank that has claimed a post is killed or stopped, the next one is due a period later. The same holds for what all
ranks of a node ask the store: one asks, and the others read when it did.

Times are those of the host's monotonic clock, and are written and read whole (8 aligned bytes). A slot has a checksum: a
reader that sees it half-written takes what it has read before.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import stat
import struct
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from muster.world.environment import Environment, launcher

POSTED, STOP, LOST, FIRST = range(4)
"""The places of the times. FIRST: whether rank 0 maps this memory, as an answer that is known."""
TOKEN = slice(64, 72)
JOINED = 128
SLOT_BYTES = 4096
HEAD = struct.Struct("<III")  # checksum of the rest, length of the text, rank


class LastTimes:
    """When things were last done, in seconds; of a rank alone, or in the memory that the ranks of a node share."""

    def __init__(self, memory: memoryview | None = None):
        self._of = (memory or memoryview(bytearray(TOKEN.start))).cast("d")

    def claims(self, what: int, every_s: float) -> bool:
        """Whether `what` is due, that is, nobody has claimed it in the last `every_s`; if so, this rank has claimed it."""
        now = time.monotonic()
        is_due = not self._of[what] or now - self._of[what] >= every_s
        if is_due:
            self._of[what] = now
        return is_due

    def known(self, what: int, every_s: float, ask: Callable[[], bool]) -> bool:
        """Return the answer to `ask`, which stays true once it is; False if somebody has asked in the last `every_s`."""
        if not self.is_known(what) and self.claims(what, every_s) and ask():
            self.set_known(what)
        return self.is_known(what)

    def is_known(self, what: int) -> bool:
        """Whether the answer is true, as far as is known."""
        return self._of[what] == math.inf

    def set_known(self, what: int) -> None:
        self._of[what] = math.inf


class NodeMemory:
    """The memory of one node's ranks in one attempt, mapped by all of them.

    index: this rank's place on the node, below `count`.
    path: the memory's file, which is removed once all have mapped it; None: there is none.
    """

    def __init__(self, memory: mmap.mmap, index: int, count: int, *, path: Path | None = None):
        self._memory, self._index, self._count, self._path = memory, index, count, path
        self.times = LastTimes(memoryview(memory)[: TOKEN.start])
        self._seen: dict[int, tuple[int, bytes]] = {}
        self.token = bytes(memory[TOKEN]).decode()
        memory[JOINED + index] = 1
        if all(memory[JOINED : JOINED + count]):
            self.unlink()

    @classmethod
    def open(cls, name: str, index: int, count: int) -> NodeMemory:
        """Map the file of this name, which the first rank to come makes.

        Raises OSError: there is no space for it. Raises ValueError: the file is another user's, or has another size.
        """
        folder = Path("/dev/shm")
        path = (folder if folder.is_dir() else Path(tempfile.gettempdir())) / name
        size = JOINED + -(-count // 64) * 64 + count * SLOT_BYTES
        with contextlib.suppress(FileNotFoundError):
            return cls(_mapped(path, size), index, count, path=path)
        made = path.with_name(f"{name}-{uuid.uuid4().hex}")
        handle = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            if sys.platform == "linux":
                os.posix_fallocate(handle, 0, size)  # a write into memory that cannot be had would end the process
            os.pwrite(handle, uuid.uuid4().hex[:8].encode(), TOKEN.start)
            with contextlib.suppress(FileExistsError):  # another rank was faster
                os.link(made, path)
        finally:
            os.close(handle)
            made.unlink()
        return cls(_mapped(path, size), index, count, path=path)

    def write(self, rank: int, text: str) -> None:
        """Write this rank's heartbeat, a line of text, into its slot."""
        said = text.encode()
        if len(said) > SLOT_BYTES - HEAD.size:
            raise ValueError(f"a heartbeat of {len(said)} bytes")
        rest = HEAD.pack(0, len(said), rank)[4:] + said
        start = self._start(self._index)
        self._memory[start : start + 4 + len(rest)] = struct.pack("<I", zlib.crc32(rest)) + rest

    def read(self) -> dict[int, bytes]:
        """Return the newest heartbeat of each rank that has written one, by rank."""
        for index in range(self._count):
            start = self._start(index)
            checksum, length, rank = HEAD.unpack_from(self._memory, start)
            rest = self._memory[start + 4 : start + HEAD.size + min(length, SLOT_BYTES - HEAD.size)]
            if checksum and checksum == zlib.crc32(rest):
                self._seen[index] = rank, bytes(rest[8:])
        return dict(self._seen.values())

    def unlink(self) -> None:
        """Remove the file, if it is there: whoever has mapped it keeps the memory."""
        if self._path:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._path = None

    def _start(self, index: int) -> int:
        return JOINED + -(-self._count // 64) * 64 + index * SLOT_BYTES


@contextlib.contextmanager
def node_memory(environment: Environment, attempt: str) -> Iterator[NodeMemory | None]:
    """Yield the memory of the ranks that torchrun has started on this node; None if it is one, or none can be had.

    All ranks must have entered the block before it ends: then the memory's file is removed.
    """
    memory = None
    if environment.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        name = hashlib.sha256(f"{launcher()} {attempt}".encode()).hexdigest()[:16]
        with contextlib.suppress(OSError, ValueError):  # no space, or another user's file: each rank talks for itself
            memory = NodeMemory.open(
                f"muster-{os.geteuid()}-{name}", environment.local_rank, environment.local_world_size
            )
    try:
        yield memory
    finally:
        if memory:
            memory.unlink()


def _mapped(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        seen = os.fstat(handle)
        if seen.st_uid != os.geteuid() or seen.st_size != size or not stat.S_ISREG(seen.st_mode):
            raise ValueError(f"{path} is not of this user's ranks")
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
