"""A kernel timer that ends this process when no code in it runs any more: torchrun waits 30 s for a stopped process."""

from __future__ import annotations

import contextlib
import ctypes
import sys

from muster.errors import say


class Watchdog:
    """A POSIX timer that kills this process, in state T, too, unless re-armed in time. Does nothing outside Linux.

    Source: timer_create(2).
    """

    class _Event(ctypes.Structure):
        _fields_ = (
            ("value", ctypes.c_void_p),
            ("signo", ctypes.c_int),
            ("notify", ctypes.c_int),
            ("pad", ctypes.c_char * 48),
        )

    class _Spec(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        self._libc: ctypes.CDLL | None = None
        if sys.platform == "linux":
            event = self._Event(None, 9, 0, b"")  # SIGKILL, SIGEV_SIGNAL
            for library in (None, "librt.so.1"):  # its library before glibc 2.34
                with contextlib.suppress(AttributeError, OSError):
                    libc = ctypes.CDLL(library)
                    if libc.timer_create(1, ctypes.byref(event), ctypes.byref(self._timer)) == 0:  # CLOCK_MONOTONIC
                        self._libc = libc
                        return
            say("muster: this system has no timer_create: a stopped rank is detected, but only torchrun can end it")

    def delete(self) -> None:
        if self._libc:
            self._libc.timer_delete(self._timer)
            self._libc = None

    def wind(self, seconds: float) -> None:
        """Kill this process `seconds` from now, unless called again before; 0 stops the timer."""
        if self._libc:
            spec = self._Spec(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)
