"""timing.jsonl: the time accounting of every rank over all attempts; steps repeated after a restart are in it twice.

Each line has a `kind`: `attempt` {time, began, step, attempt, world_size, hosts, host_of_rank, environment},
`window` {time, first, step, seconds, data, wait, evaluation, checkpoint} or
`end` {time, first, step, seconds, evaluation, checkpoint, memory_mb}. Times are in seconds, `time` and `began` since the epoch;
`data` and `wait` have one number per rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import shlex
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from muster.errors import say, storage_error
from muster.process import beginning_pid, command_line, stat_of
from muster.redact import redacted
from muster.timing.clock import Late, Stragglers, Times

NAME = "timing.jsonl"


class TimingLine(BaseModel):
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
RANKS_PER_S = 32  # a line has two numbers per rank: large worlds write lines less often


class Timing:
    """Combines log lines to windows, and writes them. Rank 0 only. After a write error, the run continues without the file."""

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
        """Return the fields of a `straggler` event, or None."""
        self._window = [so_far + now for so_far, now in zip(self._window, ranks, strict=True)]
        self._last = step
        if self._window[0].seconds < self._least_s:
            return None
        late = self._stragglers.look(self._window)
        self._write_window()
        return self._described(late, step) if late else None

    def close(self, step: int, rest: Times) -> None:
        """`rest`: times since the last log line."""
        global _ended
        if self._window[0].seconds:
            self._write_window()
        self._write("end", first=self._step, step=step, **_totals(rest), memory_mb=peak_memory_mb())
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
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}) + "\n")
        except OSError as error:
            self._failed = True
            if error.errno not in (
                errno.EMFILE,
                errno.ENFILE,
            ):  # out of descriptors: the run itself ends with that error
                say(f"muster: {storage_error(f'write {NAME}:', error)}")


_ended = 0.0  # time at which the sweep's previous job in this process ended


def began() -> float:
    """Return when this process began to work for this run, in seconds since the epoch; now if unknown."""
    if sys.platform != "linux":
        return time.time()
    try:
        ticks = int(stat_of(beginning_pid())[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return max(_ended, time.time() - age)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


def environment() -> dict[str, Any]:
    import torch  # here, so that readers of timing.jsonl do not import it

    on_cuda = torch.cuda.is_available()
    return {
        "command": shlex.join(map(redacted, command_line() or sys.argv)),
        "resumes": bool(command_line()),
        "log": log_file(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "processor": processor(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def log_file() -> str | None:
    """Return the file of the job's output: `$MUSTER_LOG` of a batch script, or this process's own; None for a terminal or pipe."""
    if named := os.environ.get("MUSTER_LOG"):
        return named
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(1).st_mode):
            return os.readlink("/proc/self/fd/1")
    return None


def peak_memory_mb() -> dict[str, int]:
    """Return this process's peaks in MB: `ram`, and `gpu` if it has used one."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024  # see getrusage(2) of each
    peak = {"ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available() and (most := torch.cuda.max_memory_allocated()):
        peak["gpu"] = most
    return {name: round(size / 1e6) for name, size in peak.items()}


def processor() -> str:
    """Return CPU vendor (else architecture) and vector instructions, which select the kernels of torch and MKL."""
    import torch

    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{found[1] if found else platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _totals(times: Times) -> dict[str, float]:
    return {part: round(getattr(times, part), 4) for part in ("seconds", "evaluation", "checkpoint")}
