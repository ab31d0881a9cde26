"""Measure how long a rank waits for the others in its steps."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from muster.world.group import World

MOST_PAIRS = 64  # CUDA event pairs kept between two reads; further steps are extrapolated from them


class Waiting:
    """Exposed communication time: from a rank's own last gradient to the end of the exchange, and that `within`.

    The first backward pass shows which parameter gets its gradient last; afterwards a step costs some microseconds. On
    CUDA the times come from device events, which only `read` evaluates.
    """

    def __init__(self, world: World, parameters: Iterable[Tensor]):
        self._is_cuda = world.device.type == "cuda"
        trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
        this = weakref.ref(
            self
        )  # torch does not collect a cycle through a hook of a parameter: model and gradients would stay

        def arrived(parameter: Tensor) -> None:
            if waiting := this():
                waiting._arrived(parameter)

        self._hooks = {each: each.register_post_accumulate_grad_hook(arrived) for each in trained}
        self._last: Tensor | None = None
        self._arrival: Any = None
        self._seconds, self._steps = 0.0, 0
        self._pairs: list[list[tuple[Any, Any]]] = []
        self._within: list[tuple[Any, Any]] = []
        self._ended = 0
        self._lock = threading.Lock()
        self._unfinished: deque[tuple[int, Any]] = deque()

    def begin(self) -> None:
        """Mark the start of a step's forward and backward passes."""
        self._arrival, self._within = None, []

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Count the time in this context, within a step, as a wait for the others."""
        began = self._moment()
        yield
        if self._is_cuda:
            self._within.append((began, self._moment()))
        else:
            self._seconds += self._moment() - began

    def end(self) -> None:
        """Mark the end of the exchange: the gradients are the global ones."""
        self._steps, self._ended = self._steps + 1, self._ended + 1
        if self._arrival is None:
            return
        if self._is_cuda:
            self._unfinished.append((self._ended, self._arrival))
            self.computed()
        end = self._moment()
        if self._is_cuda:
            if len(self._pairs) < MOST_PAIRS:
                self._pairs.append([*self._within, (self._arrival, end)])
        else:
            self._seconds += end - self._arrival
        if len(self._hooks) > 1 and self._last is not None:
            for parameter in [each for each in self._hooks if each is not self._last]:
                self._hooks.pop(parameter).remove()

    def computed(self) -> int:
        """Return the number of steps whose own gradients the device has computed; 0 on CPU. Any thread may call it."""
        if not self._is_cuda:
            return 0
        with self._lock:
            with contextlib.suppress(torch.AcceleratorError):  # which the main thread reports
                while self._unfinished and self._unfinished[0][1].query():
                    self._unfinished.popleft()
            return self._unfinished[0][0] - 1 if self._unfinished else self._ended

    def read(self) -> float:
        """Return the seconds waited since the last call. On CUDA all steps so far must be complete."""
        seconds = self._seconds
        if self._pairs:
            sampled = sum(began.elapsed_time(end) for pairs in self._pairs for began, end in pairs) / 1000
            seconds = sampled * self._steps / len(self._pairs)
        self._seconds, self._steps, self._pairs = 0.0, 0, []
        return seconds

    def _arrived(self, parameter: Tensor) -> None:
        self._last, self._arrival = parameter, self._moment()

    def _moment(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
