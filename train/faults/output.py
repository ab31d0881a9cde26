"""Output that nobody takes any more: it is dropped, and what is being done goes on.

`... | head`, a terminal that was closed, and a full disk make every write fail, also those of libraries and of loader
workers. A stream that is closed from the start (`>&-`) is worse: the next file that is opened gets its number, and what
is printed goes into that. So the entry of each process calls `endure` before anything else.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import Any, TextIO

NAMES = {1: "standard output", 2: "standard error"}
CLOSED = "MUSTER_CLOSED"
"""Which streams a launcher found closed: its ranks inherit what was put in their place."""
_lost: dict[int, str] = {}


def endure() -> None:
    """Have standard output and standard error take whatever is written to them, for as long as this process lives.

    A terminal that is closed sends SIGHUP: that is ignored, too.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in range(3):
        if not _is_open(number):
            _to_nowhere(number)
            os.environ[CLOSED] = f"{os.environ.get(CLOSED, '')}{number}"
        elif (
            number
            and str(number) in os.environ.get(CLOSED, "")
            and os.path.samestat(os.fstat(number), os.stat(os.devnull))
        ):
            _lost[number] = "it is closed"
    sys.stdout, sys.stderr = _enduring(1, sys.stdout), _enduring(2, sys.stderr)
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)  # flushed when Python ends


def lost() -> str:
    """What of this process's output was dropped, and why; empty if nothing was."""
    return "; ".join(f"{NAMES[number]}: {why}" for number, why in sorted(_lost.items()))


def has_reader() -> bool:
    """Whether anybody is there to read standard output, for what is done for its sake alone."""
    asked = select.poll()
    asked.register(1, 0)
    return not lost() and not any(found & (select.POLLERR | select.POLLHUP) for _, found in asked.poll(0))


class Enduring(io.FileIO):
    """A file of which a write cannot fail."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            number = self.fileno()
            _lost.setdefault(number, error.strerror or str(error))
            if error.errno in (
                errno.EPIPE,
                errno.EIO,
            ):  # for good: spares those who write by themselves, in C and in children
                _to_nowhere(number)
            return len(memoryview(data).cast("B"))
        if written is None:  # a terminal that another program has set to non-blocking, and that is full
            os.set_blocking(self.fileno(), True)
            return self.write(data)
        return written


def _enduring(number: int, now: TextIO | None) -> TextIO:
    """A stream that writes to the same file as `now` does, in the same way; what is no such file (a test's) is left."""
    if now is None:  # Python found it closed when it began
        _lost[number] = "it is closed"
        return open(os.devnull, "w")
    if not isinstance(now, io.TextIOWrapper) or now.fileno() != number:
        return now
    with contextlib.suppress(OSError):
        now.flush()
    raw = io.BufferedWriter(Enduring(number, "w", closefd=False))
    return io.TextIOWrapper(
        raw, now.encoding, now.errors, line_buffering=now.line_buffering, write_through=now.write_through
    )


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_nowhere(number: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)
