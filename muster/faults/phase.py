"""The phases of a rank (steps, evaluation batches, saves) and how long each may take; how long the main thread stands still."""

from __future__ import annotations

import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.clock import SYSTEM, SystemClock
from muster.code_location import innermost_own
from muster.process import stat_of

if TYPE_CHECKING:
    import torch


LONG_S = 1800.0  # a save to slow storage
STORING = "/torch/distributed/checkpoint/"
"""Of these the files in which code does not wait, but for its storage."""
FIRST_S = 600.0  # the first phases of each kind compile and tune
FIRST = 2
COLLECTIVE, BACKWARD = "collective", "backward pass"
SHARED_MEMORY = "/muster/world/reduce/shared_memory.py"
WAITING = {
    "/torch/distributed/": COLLECTIVE,
    "/torch/nn/parallel/distributed.py": COLLECTIVE,  # DDP's forward pass broadcasts buffers
    "/muster/world/group.py": COLLECTIVE,
    SHARED_MEMORY: COLLECTIVE,
    "/torch/autograd/graph.py": BACKWARD,  # full of collectives
}
"""Files in which code waits for other ranks."""
CALLS = "/torch/_ops.py"
"""A file through which functional collectives are called: their own is the next one."""
USUAL = 3  # a phase may take this many times the longest one of its kind


@dataclass(frozen=True)
class Phase:
    """The current phase of a rank; times are on its own clock.

    `number` counts the phases that the rank has entered. `waiting`: its code or its device waits for other ranks; on CUDA the
    code only launches a collective, and then waits wherever it reads a value. `gradients` counts the steps whose own gradients
    the device has computed: a hanging device has one less than those that wait for it. 0 on CPU. `calls` counts the exchanges over the
    ranks that its code has begun by `World`. `still_s`: how long it has been at one instruction: a backward pass without other ranks is
    `waiting`, too, as it is seen.
    """

    beat: int
    number: int
    label: str
    age_s: float
    limit_s: float
    waiting: bool
    where: str
    host: str
    gradients: int = 0
    calls: int = 0
    still_s: float = 0.0

    @property
    def overdue(self) -> bool:
        return self.age_s >= self.limit_s


class Phases:
    def __init__(
        self,
        *,
        timeout_s: float,
        start_s: float,
        device_is_busy: Callable[[], bool] = lambda: False,
        calls: Callable[[], int] = lambda: 0,
        clock: SystemClock = SYSTEM,
    ):
        self.timeout_s, self.device_is_busy, self.calls, self.clock = timeout_s, device_is_busy, calls, clock
        self._entered: Counter[str] = Counter()
        self._longest: dict[str, float] = {}
        self._gradients: Callable[[], Callable[[], int] | None] = lambda: None
        self._current = (0, "start-up", start_s, self.clock.monotonic())
        self.step: int | None = None
        """The step of the phase; None before the first one."""
        self.still_s = 0.0
        """Seconds that the main thread has been stuck at one instruction."""

    def count_gradients(self, computed: Callable[[], int]) -> None:
        """Post what the method `computed` returns. Its object is held weakly: it keeps the process group's connections open."""
        self._gradients = weakref.WeakMethod(computed)

    def enter(self, kind: str, step: int) -> None:
        """`step`, `evaluation` and `end` (of a user's loop) are limited by their longest one so far, any other kind by LONG_S."""
        self.step = step
        number, label, _, since = self._current
        now, before = self.clock.monotonic(), label.split()[0]
        if self._entered[before] >= FIRST:
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._entered[kind] += 1
        limit_s = LONG_S
        if kind in ("step", "evaluation", "end"):
            limit_s = FIRST_S if self._entered[kind] <= FIRST else USUAL * self._longest.get(kind, 0.0)
        self._current = (number + 1, f"{kind} {step}", max(limit_s, self.timeout_s), now)

    @property
    def age_s(self) -> float:
        return self.clock.monotonic() - self._current[3]

    @property
    def limit_s(self) -> float:
        return self._current[2]

    def now(self, beat: int) -> Phase:
        """Looks up the code's position only after the phase has lasted a while.

        A collective that the code is stuck in compiles nothing: also in a first phase it may take `timeout_s`, and no more.
        """
        number, label, limit_s, since = self._current
        age_s = self.clock.monotonic() - since
        where, waits_in = code_position() if age_s > self.timeout_s / 4 else ("", "")
        if waits_in == COLLECTIVE and limit_s == FIRST_S and self.still_s >= self.timeout_s:
            limit_s = self.timeout_s
        waiting = bool(waits_in or (where and self.device_is_busy()))
        count = self._gradients()
        gradients = count() if count else 0
        host, calls, still_s = socket.gethostname(), self.calls(), self.still_s
        return Phase(beat, number, label, age_s, limit_s, waiting, where, host, gradients, calls, still_s)


def cuda_is_busy(device: torch.device) -> bool:
    """Whether a CUDA device has unfinished work, such as a collective that waits for other ranks.

    A device's error is the main thread's to report, and must not end the heartbeat.
    """
    import torch

    try:
        return device.type == "cuda" and not torch.cuda.current_stream(device).query()
    except torch.AcceleratorError:
        return False


def code_position() -> tuple[str, str]:
    """Return the main thread's place in user code, else outside of torch, and in what it waits for other ranks there, or ""."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and CALLS in frame.f_code.co_filename and frame.f_back:
        frame = frame.f_back
    waiting, first = "", frame
    if frame and STORING not in (path := frame.f_code.co_filename):
        waiting = next((what for place, what in WAITING.items() if place in path), "")
    while frame and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if not (frame := frame or first):
        return "unknown code", waiting
    frame = innermost_own(frame) or frame
    source = Path(frame.f_code.co_filename)
    return f"{source.parent.name}/{source.name}:{frame.f_lineno} ({frame.f_code.co_name})", waiting


OWN_THREADS = threading.__file__
"""Waits for a lock or a thread, such as the checkpoint writer; signal handlers run there."""

Place = tuple[int, int] | None


class Stillness:
    """How long the main thread has been stuck at one instruction, not counting waits for threads of its own process.

    A thread that waits in C, as for a device whose collective never ends, runs no signal handler: SIGTERM does not end it.
    """

    def __init__(self, *, place: Callable[[], Place] | None = None, clock: SystemClock = SYSTEM):
        self._place, self.clock = place or main_thread, clock
        self._last: tuple[Place, int] = (None, -1)
        self._since = self.clock.monotonic()

    def seconds(self, phase: int) -> float:
        """Return how long all calls have found the main thread at one place in phase number `phase`."""
        here, now = self._place(), self.clock.monotonic()
        if here is None or (here, phase) != self._last:
            self._last, self._since = (here, phase), now
        return now - self._since


def main_thread() -> Place:
    """Return the main thread's frame and instruction; None if it waits for a thread of this process.

    A wait in shared memory is many short ones, in frames that come and go: it is at the instruction that has called for it.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and SHARED_MEMORY in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == OWN_THREADS:
        return None
    return id(frame), frame.f_lasti


def main_thread_sleeps() -> bool:
    """Whether the main thread neither runs nor waits for a CPU. Linux only."""
    return stat_of(threading.main_thread().native_id or 0)[:1] == ["S"]
