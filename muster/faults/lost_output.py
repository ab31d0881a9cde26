"""Drop output that can no longer be written, instead of failing.

`... | head`, a closed terminal and a full disk make every write fail, also of libraries and loader workers. A stream that is
closed from the start (`>&-`) is worse: the next opened file gets its descriptor, and printed text. So each process's entry calls
`endure` before anything else.
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
"""Variable with the streams that a launcher found closed: its ranks inherit the replacements."""
PERMANENT = (errno.EPIPE, errno.EIO)
_lost: dict[int, str] = {}


def endure() -> None:
    """Make writes to stdout and stderr never fail, for the rest of this process. Ignores SIGHUP, which a closed terminal sends."""
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
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)  # Python flushes these when it ends


def lost() -> str:
    """Return which output was dropped, and why; empty if none was."""
    return "; ".join(f"{NAMES[number]}: {why}" for number, why in sorted(_lost.items()))


def has_reader() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return not lost() and not any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


class Enduring(io.FileIO):
    """On an error records the cause and drops the data."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            number = self.fileno()
            _lost.setdefault(number, error.strerror or str(error))
            if error.errno in PERMANENT:  # also redirect writes of C code and of children
                _to_nowhere(number)
            return len(memoryview(data).cast("B"))
        if written is None:  # a full terminal that another program has set to non-blocking
            os.set_blocking(self.fileno(), True)
            return self.write(data)
        return written


def _enduring(number: int, now: TextIO | None) -> TextIO:
    """A stream on another file (a test's) stays as it is."""
    if now is None:  # the stream was closed when Python started
        _lost[number] = "it is closed"
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(now, io.TextIOWrapper) or now.fileno() != number:
        return now
    with contextlib.suppress(OSError):
        now.flush()
    raw: Any = Enduring(number, "w", closefd=False)
    can_all = now.encoding.lower() == "utf-8" and now.errors != "strict"  # not in a locale like C
    return io.TextIOWrapper(
        raw if now.write_through else io.BufferedWriter(raw),
        now.encoding,
        now.errors if can_all else "backslashreplace",
        line_buffering=now.line_buffering,
        write_through=now.write_through,
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
