"""The records that a run sends to its loggers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from muster.errors import ConfigError, one_line, say
from muster.faults import lost_output
from muster.loggers.base import Logger
from muster.redact import redacted_all
from muster.timing.clock import Times
from muster.timing.timing_file import Timing
from muster.world.counts import OF, SEEN

OF_RECORDS = ("kind", "event", "step", "epoch", "samples", "samples_per_s", "time")
"""Names that a loop's own values may not have."""
Rates = Callable[[float, float | None], dict[str, float]]
"""(samples per second, what the loss counts in a sample) -> further entries of a `train` record."""
RECENT = 64  # rank 0's are more: those of checkpoints, and of stragglers


class Metrics:
    """Creates records and passes them to the loggers, if this rank has some.

    `samples`: before the first record. `windows`: writes the ranks' times.
    """

    def __init__(
        self,
        loggers: list[Logger],
        *,
        samples: int,
        windows: Timing | None = None,
        rates: Rates = lambda speed, counted: {},
    ):
        self._loggers, self._since, self._windows = loggers, (samples, time.perf_counter()), windows
        self._worked_s, self._rates = 0.0, rates
        self._lock = threading.Lock()  # the checkpoint writer reports from its own thread
        self._output_lost = ""
        self.of_body = deque[str](maxlen=RECENT)
        """The evaluations since `end_body`."""
        self.told = list[str]()
        """Recorded evaluations of a body that is repeated, as a rank's death has ended it."""
        self.recent = deque[dict[str, Any]](maxlen=RECENT)
        """Kept on every rank: rank 0 may die before it has written one."""

    def begin(self) -> None:
        """Start the clock of the training speed."""
        self._since = (self._since[0], time.perf_counter() - self._worked_s)
        self._worked_s = 0.0

    def since_last(self) -> tuple[int, float]:
        """Return the samples at the last `train` record, and the seconds of training since then."""
        samples, then = self._since
        return samples, time.perf_counter() - then

    def go_on(self, samples: int, seconds: float) -> None:
        """Continue the `since_last` of an attempt that a rank's death has ended."""
        self._since, self._worked_s = (samples, self._since[1]), seconds

    def train(
        self,
        *,
        step: int,
        epoch: int,
        loss: float | None,
        lr: float | None,
        grad_norm: float | None,
        samples: int,
        more: dict[str, float],
        counted: float | None = None,
    ) -> None:
        """None: not known. `counted`: items per sample that the mean loss is over, if it is not over samples."""
        (samples_then, then), now = self._since, time.perf_counter()
        self._since = (samples, now)
        speed = (samples - samples_then) / (now - then)
        rates = {"samples_per_s": round(speed, 1), **self._rates(speed, counted)}
        known = {"step": step, "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        self._log("train", **known, samples=samples, **rates, **more)

    def eval(self, *, step: int, epoch: int, seconds: float, values: dict[str, float]) -> None:
        """`seconds`: duration of the evaluation, excluded from the training speed."""
        samples, then = self._since
        self._since = (samples, then + seconds)
        record = {"step": step, "epoch": epoch, **values}
        self.of_body.append(text := _as_text(record))
        if text in self.told:
            self.told.remove(text)
        else:
            self._log("eval", **record)

    def repeat_body(self, told: list[str]) -> None:
        self.of_body.clear()
        self.told = told

    def end_body(self) -> None:
        """The body of a user's own loop has ended: it is not repeated."""
        self.repeat_body([])

    def event(self, event: str, **details: Any) -> None:
        """`event`: start, resume, checkpoint, preempted, restart, straggler, done and others."""
        self._log("event", event=event, time=round(time.time(), 3), **redacted_all(details))

    def event_once(self, event: str, *, step: int, **details: Any) -> None:
        """Log an event, unless the previous attempt, which a rank's death has ended, has done so."""
        if ("event", event, step, None) not in map(_identity, self.recent):
            self.event(event, step=step, **details)

    def timing(self, step: int, ranks: list[Times]) -> None:
        """Log each rank's times, and a `straggler` event if the others wait for one rank."""
        with self._lock:
            for logger in [*self._loggers]:
                self._surely(logger, partial(logger.timing, step, ranks))
        if self._windows and (late := self._windows.add(step, ranks)):
            self.event("straggler", **late)

    def advance(self, step: int) -> None:
        for logger in self._loggers:
            self._surely(logger, partial(logger.advance, step))

    def close(self, step: int = 0, rest: Times | None = None) -> None:
        """`rest`: times since the last call of `timing`. A second call does nothing."""
        windows, self._windows = self._windows, None
        if windows:
            windows.close(step, rest or Times())
        with self._lock:
            for logger in self._loggers:
                self._surely(logger, logger.close)
            self._loggers = []  # a checkpoint writer may still report after the end of the run

    def make_up(self, records: Iterable[dict[str, Any]], *, known: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Log, and return, those of another rank's `recent` records that are not `known`."""
        seen = {_identity(record) for record in known}
        missing = [record for record in records if _identity(record) not in seen]
        for record in missing:
            self._log(**record)
        return missing

    def _log(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self.recent.append({"kind": kind, **fields})
            for logger in [*self._loggers]:
                self._surely(logger, partial(logger.log, {"kind": kind, **fields}))
        if not self._output_lost and (why := lost_output.lost()):
            self._output_lost = why
            self.event("note", text=f"{why}: output is dropped, and the run continues")

    def _surely(self, logger: Logger, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._loggers = [other for other in self._loggers if other is not logger]
            say(f"muster: {type(logger).__name__} has failed, the run continues without it: {one_line(error)[:200]}")


def check_names(names: Iterable[str], what: str, *, taken: Iterable[str] = ()) -> None:
    """Raise ConfigError for a name that records or sums use themselves; `taken`: further ones."""
    for name in names:
        if name in OF_RECORDS or name in taken or name.endswith((OF, SEEN)):
            raise ConfigError(f"{what} has the name {name}, which records use themselves: choose another")


def is_same(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks' records are one of their run."""
    return _identity(record) == _identity(other)


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    text = _as_text(record) if record["kind"] == "eval" else record.get("text")
    return record["kind"], record.get("event"), record.get("step"), text


def _as_text(record: dict[str, Any]) -> str:
    """A number that is not finite is None in a file."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return repr(sorted((name, value) for name, value in plain.items() if name != "kind"))
