"""Finds a rank that hangs, names it and ends it within `dist.timeout_s`.

In a collective all ranks wait for the last one, so when one hangs all stand still, and the collective's own timeout
tells none from the other. Here each rank posts to the store where it stands: how many sections of work (steps,
evaluation batches, saves) it has begun. A rank that has stood still for longer than its section allows looks at all:

- whoever gives no sign of life is lost: stopped, or behind a cut link;
- whoever is furthest behind hangs: it began fewer sections, or is in code of its own while the others wait for it;
- whoever is behind but still within its time (a long save, a first compile) excuses the others.

The ranks that hang say where their code stands and leave, the others leave after them, and the launcher restarts all.
A stopped process can do nothing itself, and torchrun waits 30 s for it to take SIGTERM: for it the kernel holds a
timer that sends SIGKILL, and that every beat winds up again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import RankLost, say

if TYPE_CHECKING:
    from train.dist.world import World

BEAT_S = 0.1
LONG_S = 1800.0  # a save to slow storage
FIRST_S = 600.0  # the first sections of each kind compile and tune
FIRST = 2
USUAL = 3  # times as long as a section of its kind has ever taken is still no hang
GRACE_S = 2.0  # for the rank that hangs to say so itself
LAST_WORDS_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as it posted it. Times are its own: seconds since it entered the section, and the most allowed."""

    beat: int
    sections: int
    label: str
    age_s: float
    limit_s: float
    waiting: bool
    where: str
    host: str

    @property
    def overdue(self) -> bool:
        return self.age_s >= self.limit_s


def last(places: dict[int, Place]) -> list[int]:
    """The ranks that all others wait for: fewest sections begun, and of those the ones in code of their own."""
    behind = min((place.sections, place.waiting) for place in places.values())
    return [rank for rank, place in sorted(places.items()) if (place.sections, place.waiting) == behind]


class Heartbeat:
    """This rank's sign of life, and its eye on the others."""

    def __init__(self, world: World, *, timeout_s: float, start_s: float, on_hang: Callable[[RankLost], object]):
        self.world, self.timeout_s, self.on_hang = world, timeout_s, on_hang
        self._section = (0, "start-up", start_s, time.monotonic())
        self._begun: Counter[str] = Counter()
        self._longest: dict[str, float] = {}
        self._told = -1
        self._beat = 0
        self._watching = threading.Event()
        self._watched_for_good = False
        self._others: dict[int, Place] = {}
        self._changed: dict[int, float] = {}
        self.gone: list[int] = []
        """The ranks that `silence` found."""
        self._answered = 0.0
        self._store_is_gone = False
        self._pause_s = BEAT_S * max(1.0, world.size / 100)  # between looks: all look at all
        self._ended = threading.Event()
        self._timer: _DeadManSwitch | None = None

    def start(self) -> None:
        """Begin to beat. A launcher must be there that restarts what is ended."""
        self._store = self.world.store.clone() if self.world.size > 1 else self.world.store
        self._timer = _DeadManSwitch()
        for work in (self._judge, self._exchange):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def begin(self, kind: str, step: int) -> None:
        """Enter a section of work: `step`, `evaluation`, `save` or `finish`."""
        sections, label, _, since = self._section
        now, before = time.monotonic(), label.split()[0]
        if self._begun[before] >= FIRST:
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._begun[kind] += 1
        limit_s = LONG_S
        if kind in ("step", "evaluation"):
            limit_s = FIRST_S if self._begun[kind] <= FIRST else USUAL * self._longest.get(kind, 0.0)
        self._section = (sections + 1, f"{kind} {step}", max(limit_s, self.timeout_s), now)

    def close(self) -> None:
        """Stop beating; what is left to do for this process must not take long."""
        self._ended.set()
        if self._timer:
            self._timer.wind(self.timeout_s + LAST_WORDS_S)

    def watch(self) -> None:
        """Look at the other ranks from now on, whatever this one does."""
        self._watched_for_good = True
        self._look()

    def _look(self) -> None:
        if not self._watching.is_set():
            self._answered = time.monotonic()  # what was seen before counts neither for nor against anybody
            self._changed = dict.fromkeys(self._changed, self._answered)
            self._watching.set()

    def silence(self, seconds: float, *, waited: str = "") -> RankLost | None:
        """Which ranks, or whether the store, have given no sign of life for `seconds`; needs as long a watch before."""
        now, me, seconds = time.monotonic(), self.world.rank, max(seconds, 2 * self._pause_s)
        told = f"gives no sign of life{waited}: killed, stopped or cut off"
        if self._store_is_gone or now - self._answered > seconds:
            address = os.environ.get("MASTER_ADDR", "this host")
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and me != 0:  # it is in rank 0's process
                host = self._others[0].host if 0 in self._others else address
                return RankLost(f"rank 0 on {host} {told}", rank=0, host=host)
            return RankLost(f"the rendezvous store at {address} {told} from {self._name(me)}")
        self.gone = sorted(rank for rank, at in list(self._changed.items()) if now - at > seconds and rank != me)
        if not self.gone:
            return None
        names = ", ".join(self._name(rank) for rank in self.gone[:8])
        return RankLost(f"{names} {told}", rank=self.gone[0], host=self._others[self.gone[0]].host)

    def _own(self) -> Place:
        sections, label, limit_s, since = self._section
        age_s = time.monotonic() - since
        where, waiting = _standing() if age_s > self.timeout_s / 4 else ("", False)
        return Place(self._beat, sections, label, age_s, limit_s, waiting, where, socket.gethostname())

    def _exchange(self) -> None:
        """Post and, while somebody wants to know, read. In a thread of its own: a cut-off store may block for ever."""
        try:
            while not self._ended.is_set():
                self._beat += 1
                self._store.set(f"beat/{self.world.rank}", json.dumps(asdict(self._own())))
                if self._watching.is_set() or len(self._others) < self.world.size:
                    self._read()
                self._ended.wait(self._pause_s if self._watching.is_set() else BEAT_S)
        except RuntimeError:
            self._store_is_gone = True

    def _read(self) -> None:
        if self.world.size == 1:
            self._answered = time.monotonic()
            return
        keys = [f"beat/{rank}" for rank in range(self.world.size)]
        if not self._store.check(keys):
            self._answered = time.monotonic()
            return  # somebody has not come so far as to beat
        for rank, text in enumerate(self._store.multi_get(keys)):
            place = Place(**json.loads(text))
            if rank not in self._others or place.beat != self._others[rank].beat:
                self._changed[rank] = time.monotonic()
            self._others[rank] = place
        self._answered = time.monotonic()

    def _judge(self) -> None:
        """Wind up the timer; when this rank stands still for too long, find out whose fault it is."""
        assert self._timer
        while not self._ended.wait(BEAT_S):
            self._timer.wind(self.timeout_s)
            try:
                verdict = self._verdict()
            except Exception:  # a defect here must not end a healthy run, as a timer that is not wound would
                traceback.print_exc()
                self._ended.wait(self.timeout_s / 2)
                continue
            if verdict and not self._ended.is_set():
                self._timer.wind(self.timeout_s + LAST_WORDS_S)
                self.on_hang(verdict)
                return

    def _verdict(self) -> RankLost | None:
        """Why this rank has to leave; None if all is well or has to be waited for."""
        sections, _, limit_s, since = self._section
        age_s = time.monotonic() - since
        if age_s < self.timeout_s / 2:
            if not self._watched_for_good:
                self._watching.clear()
            return None
        self._look()
        if age_s < self.timeout_s - BEAT_S:
            return None
        waited = f" while rank {self.world.rank} waited for dist.timeout_s={self.timeout_s:g}"
        verdict = self.silence(self.timeout_s / 2 - 3 * BEAT_S, waited=waited)
        if not verdict and age_s >= limit_s - BEAT_S:
            verdict = self._fault(patient=age_s < limit_s + GRACE_S)
        if not verdict and self.world.is_first and sections != self._told:
            self._told = sections
            self._tell(age_s)
        return verdict

    def _tell(self, age_s: float) -> None:
        """No hang yet, but nobody shall have to look at a silent terminal."""
        places = {**self._others, self.world.rank: self._own()}
        behind = min(last(places))
        say(
            f"muster: waiting for {age_s:.0f} s so far: {self._name(behind)} stands in {places[behind].where}, "
            f"and may for {places[behind].limit_s:.0f} s"
        )

    def _fault(self, *, patient: bool) -> RankLost | None:
        """Why this rank must leave now; None while it has to wait for others."""
        me, told = self.world.rank, f"for dist.timeout_s={self.timeout_s:g}"
        places = {**self._others, me: self._own()}
        if len(places) < self.world.size:
            return None
        culprits = last(places)
        if not all(places[rank].overdue for rank in culprits) or (patient and me not in culprits):
            return None
        if me in culprits:
            traceback.print_stack(sys._current_frames().get(threading.main_thread().ident or 0))
        where = "; ".join(f"{self._name(rank)} stands in {places[rank].where}" for rank in culprits[:4])
        if len(culprits) == len(places) > 1:
            return RankLost(
                f"all ranks have stood still {told}: {where}: collectives that do not match, or a network that loses data"
            )
        return RankLost(f"{where} and has not moved {told} or longer", rank=culprits[0], host=places[culprits[0]].host)

    def _name(self, rank: int) -> str:
        place = self._own() if rank == self.world.rank else self._others[rank]
        return f"rank {rank} on {place.host} ({place.label})"


def _standing() -> tuple[str, bool]:
    """Where the main thread's code stands, outside of torch, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    waiting, first = False, frame
    if frame:
        path = frame.f_code.co_filename
        waiting = "/torch/distributed/" in path or path.endswith("/torch/autograd/graph.py")
    while frame and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or first
    if not frame:
        return "unknown code", waiting
    source = Path(frame.f_code.co_filename)
    return f"{source.parent.name}/{source.name}:{frame.f_lineno} ({frame.f_code.co_name})", waiting


class _DeadManSwitch:
    """A POSIX timer that kills this process when it is not wound up in time, stopped or not. Linux; elsewhere nothing.

    Source: timer_create(2). SIGKILL needs no code of ours to run, so it also ends a process in state T.
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
            for library in (None, "librt.so.1"):  # where it was before glibc 2.34
                with contextlib.suppress(AttributeError, OSError):
                    libc = ctypes.CDLL(library)
                    if libc.timer_create(1, ctypes.byref(event), ctypes.byref(self._timer)) == 0:  # CLOCK_MONOTONIC
                        self._libc = libc
                        return
            say("muster: no timer_create here: a stopped rank is found, but ended by torchrun alone")

    def wind(self, seconds: float) -> None:
        """Kill this process `seconds` from now, unless wound again."""
        if self._libc:
            spec = self._Spec(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)
