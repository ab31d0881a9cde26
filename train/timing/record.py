"""timing.jsonl: where the time of every rank went, over all attempts; steps that a restart repeated are in it twice.

Its lines have a `kind`: `attempt` {time, began, step, attempt, world_size, hosts, host_of_rank, environment}, `window` {time, first,
step, seconds, data, wait, evaluation, checkpoint}, `end` {time, first, step, seconds, evaluation, checkpoint}. Times in seconds;
`data` and `wait` have one number for each rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from train.errors import say, storage_error
from train.redact import redacted
from train.timing.clock import Times
from train.timing.straggler import Late, Stragglers

NAME = "timing.jsonl"


class TimingLine(BaseModel):
    """Entries that every line has."""

    model_config = ConfigDict(strict=True, extra="allow")
    time: float
    step: int


class AttemptLine(TimingLine):
    began: float
    hosts: list[str]
    host_of_rank: list[int]
    environment: dict[str, Any]


class EndLine(TimingLine):
    first: int
    seconds: float
    evaluation: float
    checkpoint: float


class WindowLine(EndLine):
    data: list[float]
    wait: list[float]


KINDS: dict[str, type[BaseModel]] = {"attempt": AttemptLine, "window": WindowLine, "end": EndLine}
WINDOW_S = 0.5
RANKS_PER_S = 32  # a line has two numbers for each rank: of large worlds there is one more seldom


class Timing:
    """On rank 0: adds log lines up to windows, writes them, and looks for stragglers.

    A file that cannot be written is said once; the run goes on without it.
    """

    def __init__(self, folder: Path, *, hosts: Sequence[str], attempt: str, step: int):
        self._path, self._hosts, self._step = folder / NAME, hosts, step
        self._last = step
        self._window = [Times() for _ in hosts]
        self._stragglers, self._failed = Stragglers(), False
        self._least_s = max(WINDOW_S, len(hosts) / RANKS_PER_S)
        names = list(dict.fromkeys(hosts))
        self._write(
            "attempt", began=round(began(), 3), step=step, attempt=attempt, world_size=len(hosts),
            hosts=names, host_of_rank=[names.index(host) for host in hosts], environment=environment(),
        )  # fmt: skip

    def add(self, step: int, ranks: Sequence[Times]) -> dict[str, Any] | None:
        """Everybody's times up to `step`. Gives back what there is to say of a straggler."""
        self._window = [so_far + now for so_far, now in zip(self._window, ranks, strict=True)]
        self._last = step
        if self._window[0].seconds < self._least_s:
            return None
        late = self._stragglers.look(self._window)
        self._write_window()
        return self._described(late, step) if late else None

    def close(self, step: int, rest: Times) -> None:
        """The attempt ends at `step`, `rest` after the last log line."""
        global _ended
        if self._window[0].seconds:
            self._write_window()
        self._write("end", first=self._step, step=step, **_totals(rest))
        _ended = time.time()

    def _write_window(self) -> None:
        window, self._window = self._window, [Times() for _ in self._hosts]
        self._write(
            "window",
            first=self._step,
            step=self._last,
            **_totals(window[0]),
            data=[round(times.data, 4) for times in window],
            wait=[round(times.wait, 4) for times in window],
        )
        self._step = self._last

    def _described(self, late: Late, step: int) -> dict[str, Any]:
        host, share = self._hosts[late.rank], round(late.share, 3)
        return {"step": step, "rank": late.rank, "host": host, "share_lost": share, "cause": late.cause}

    def _write(self, kind: str, **fields: Any) -> None:
        if self._failed:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}) + "\n")
        except OSError as error:
            self._failed = True
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # the run itself ends for want of them, and says so
                say(f"muster: {storage_error(f'write {NAME}:', error)}")


_ended = 0.0  # when the job of a sweep before this one had ended, in this process


def began() -> float:
    """When this process began to work for this run, as seconds since the epoch; where the system does not say, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return max(_ended, time.time() - age)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


def environment() -> dict[str, Any]:
    """What this process runs with."""
    import torch  # not for those who only read

    on_cuda = torch.cuda.is_available()
    return {
        "command": shlex.join(map(redacted, sys.argv)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "processor": processor(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Vendor and vector instructions, by which torch and MKL choose their kernels; where the system does not say, what it is."""
    import torch

    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found[1] if found else platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _totals(times: Times) -> dict[str, float]:
    return {part: round(getattr(times, part), 4) for part in ("seconds", "evaluation", "checkpoint")}
