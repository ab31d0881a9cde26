"""Let ranks that were started by hand find a common store through a shared folder, if no port is available.

`dist.init_method=file:///shared/path` names the files below. Killed launches may have left any of them:

1. Rank 0 locks path.lock for its lifetime. Stores and answers that exist then belong to no live launch: rank 0 removes
   them, and makes path.store-NAME under a name that no earlier launch had.
2. Each other rank writes path.hello-RANK with a random word of its own, and writes it again if the file is removed.
3. Rank 0 answers each word that it finds with path.answer-RANK: the word and the name of the store.
4. A rank accepts only an answer to its own word, so an old answer cannot mislead it.

The hello of a dead rank gets an answer too, but no rank comes. The meeting over the store names the missing ranks. No
clocks are compared, and every file appears in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import FileStore, Store

from muster.errors import StorageError
from muster.files import replace_file
from muster.world.environment import Environment
from muster.world.rendezvous.network import Stopped, Unheard

POLL_S = 0.05
LOOKS_PER_S = 1000.0  # polls of rank 0, over the hellos of all ranks
T = TypeVar("T")


class SharedFile:
    """Access of one process to the store: `open` it, call `met` once all ranks have met, and `remove` at the end."""

    def __init__(self, environment: Environment, path: Path, *, timeout_s: float, stopping: Callable[[], bool]):
        self.environment, self.path, self.timeout_s, self.stopping = environment, path, timeout_s, stopping
        self._deadline = time.monotonic() + timeout_s
        self._lock: int | None = None
        self._met = threading.Event()
        self._answering: threading.Thread | None = None

    def open(self) -> Store:
        """Return a client of the store.

        Raises Unheard: rank 0 did not come, another launch uses the path, or the folder cannot be used. Raises Stopped: this process
        was told to stop meanwhile.
        """
        try:
            return self._host() if self.environment.rank == 0 else self._client(self._heard())
        except (OSError, StorageError) as error:
            raise Unheard(f"dist.init_method=file://{self.path} cannot be used: {error}") from error

    def met(self) -> None:
        """On rank 0: stop answering hellos."""
        self._met.set()
        if self._answering:
            self._answering.join()
            self._answering = None
            self._clear("hello-", "answer-")

    def remove(self) -> None:
        """On rank 0: remove all files and release the lock for the next launch."""
        self.met()
        if self._lock is not None:
            self._clear("hello-", "answer-", "store-", "lock")
            os.close(self._lock)
            self._lock = None

    def _host(self) -> Store:
        self._lock = self._awaited(self._try_lock)
        if self._lock is None:
            with contextlib.suppress(OSError):
                holder = self._named("lock").read_text(encoding="utf-8")
            raise Unheard(
                f"another launch ({holder or 'unknown'}) is at work with dist.init_method=file://{self.path}: end it, or "
                "give each launch a path of its own"
            )
        self._clear("answer-", "store-")
        name = uuid.uuid4().hex[:12]
        store = self._client(name)
        self._answering = threading.Thread(target=self._answer, args=(name,), name="answering", daemon=True)
        self._answering.start()
        return store

    def _try_lock(self) -> int | None:
        """Take a POSIX lock, which ends with this process and is not inherited by children; None if it is taken."""
        lock = os.open(self._named("lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == self._named("lock").stat().st_ino:  # else its holder has just removed it
                os.ftruncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return lock
        except (BlockingIOError, PermissionError, FileNotFoundError):
            pass
        os.close(lock)
        return None

    def _answer(self, name: str) -> None:
        answered: dict[int, str] = {}
        while not self._met.wait(max(POLL_S, self.environment.world_size / LOOKS_PER_S)):
            for rank in range(1, self.environment.world_size):
                with contextlib.suppress(OSError, StorageError):  # no hello yet, or the rank will miss its answer
                    word = self._named(f"hello-{rank}").read_text(encoding="utf-8")
                    if answered.get(rank) != word:
                        self._write(f"answer-{rank}", f"{word} {name}")
                        answered[rank] = word

    def _heard(self) -> str:
        word, rank = uuid.uuid4().hex, self.environment.rank

        def ask() -> str | None:
            if not self._named(f"hello-{rank}").exists():
                self._write(f"hello-{rank}", word)
            with contextlib.suppress(FileNotFoundError):
                its_word, _, name = self._named(f"answer-{rank}").read_text(encoding="utf-8").partition(" ")
                return name if its_word == word else None
            return None

        self._write(f"hello-{rank}", word)
        if name := self._awaited(ask):
            return name
        raise Unheard(
            f"rank {rank} on {socket.gethostname()} waited in vain for rank 0 at file://{self.path}: is it up, and does it see "
            "the same folder?"
        )

    def _awaited(self, ask: Callable[[], T | None]) -> T | None:
        """Poll `ask` and return its first result that is not None; None at the deadline. Raises Stopped."""
        while (found := ask()) is None and time.monotonic() < self._deadline:
            if self.stopping():
                raise Stopped
            time.sleep(POLL_S)
        return found

    def _client(self, name: str) -> Store:
        store = FileStore(str(self._named(f"store-{name}")))  # given no world size, it never removes the file
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def _write(self, suffix: str, text: str) -> None:
        replace_file(self._named(suffix), lambda draft: draft.write_text(text, encoding="utf-8"))

    def _named(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def _clear(self, *suffixes: str) -> None:
        for path in self._left(suffixes):
            with contextlib.suppress(OSError):
                path.unlink()

    def _left(self, suffixes: tuple[str, ...]) -> Iterator[Path]:
        wanted = tuple(f"{self.path.name}.{suffix}" for suffix in suffixes)
        with contextlib.suppress(OSError):
            yield from [path for path in self.path.parent.iterdir() if path.name.startswith(wanted)]
