"""How ranks started by hand find one store through a folder that all see, where no port can be had.

`dist.init_method=file:///shared/path` names files beside it, of which killed launches may have left any:

1. rank 0 locks path.lock for as long as it lives. What lies there of stores and answers is then nobody's: it removes
   it, and makes path.store-NAME, a name that no launch had before;
2. each other rank leaves path.hello-RANK with a word of its own, and leaves it again if somebody has removed it;
3. rank 0 answers each word that it finds by path.answer-RANK: the word, and the name of the store;
4. a rank believes an answer to its own word alone, so an old one leads nobody astray.

The hello of a dead rank is answered as well, and nobody comes. Who is missing is for the meeting over the store to say.
No clock is compared, and every file appears in one step.
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

from train.dist.network import Stopped, Unheard
from train.dist.place import Place
from train.errors import StorageError
from train.files import replace_file

POLL_S = 0.05
LOOKS_PER_S = 1000.0  # of rank 0, at the hellos of all ranks
T = TypeVar("T")


class SharedFile:
    """One process's way to the store. `open` it, say `met` once all have met, and `remove` it at the end."""

    def __init__(self, place: Place, path: Path, *, timeout_s: float, stopping: Callable[[], bool]):
        self.place, self.path, self.timeout_s, self.stopping = place, path, timeout_s, stopping
        self._deadline = time.monotonic() + timeout_s
        self._lock: int | None = None
        self._met = threading.Event()
        self._answering: threading.Thread | None = None

    def open(self) -> Store:
        """A client of the store.

        Raises:
            Unheard: rank 0 did not come, another launch is at work there, or the folder cannot be used.
            Stopped: told to stop meanwhile.
        """
        try:
            return self._host() if self.place.rank == 0 else self._client(self._heard())
        except (OSError, StorageError) as error:
            raise Unheard(f"dist.init_method=file://{self.path} cannot be used: {error}") from error

    def met(self) -> None:
        """On rank 0: answer nobody any more."""
        self._met.set()
        if self._answering:
            self._answering.join()
            self._answering = None
            self._clear("hello-", "answer-")

    def remove(self) -> None:
        """On rank 0: leave nothing behind, and let the next launch in."""
        self.met()
        if self._lock is not None:
            self._clear("hello-", "answer-", "store-", "lock")
            os.close(self._lock)
            self._lock = None

    def _host(self) -> Store:
        self._lock = self._awaited(self._try_lock)
        if self._lock is None:
            with contextlib.suppress(OSError):
                holder = self._named("lock").read_text()
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
        """A lock of POSIX's: it ends with this process, and no child has it."""
        lock = os.open(self._named("lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == self._named("lock").stat().st_ino:  # or its holder has just removed it
                os.ftruncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return lock
        except (BlockingIOError, PermissionError, FileNotFoundError):
            pass
        os.close(lock)
        return None

    def _answer(self, name: str) -> None:
        answered: dict[int, str] = {}
        while not self._met.wait(max(POLL_S, self.place.world_size / LOOKS_PER_S)):
            for rank in range(1, self.place.world_size):
                with contextlib.suppress(OSError, StorageError):  # not there yet; what cannot be written is missed there
                    word = self._named(f"hello-{rank}").read_text()
                    if answered.get(rank) != word:
                        self._write(f"answer-{rank}", f"{word} {name}")
                        answered[rank] = word

    def _heard(self) -> str:
        """The name of the store, once rank 0 has answered."""
        word, rank = uuid.uuid4().hex, self.place.rank

        def ask() -> str | None:
            if not self._named(f"hello-{rank}").exists():
                self._write(f"hello-{rank}", word)
            with contextlib.suppress(FileNotFoundError):
                its_word, _, name = self._named(f"answer-{rank}").read_text().partition(" ")
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
        """What it gives, once that is not None; None at the deadline. Raises Stopped."""
        while (found := ask()) is None and time.monotonic() < self._deadline:
            if self.stopping():
                raise Stopped
            time.sleep(POLL_S)
        return found

    def _client(self, name: str) -> Store:
        store = FileStore(str(self._named(f"store-{name}")))  # without a number of ranks it never removes the file
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def _write(self, suffix: str, text: str) -> None:
        replace_file(self._named(suffix), lambda draft: draft.write_text(text))

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
