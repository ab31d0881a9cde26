"""metrics.jsonl: the run's record, one JSON object per line, from which reports are made.

A line that a kill cut short, or with entries of a wrong type after a disk error or an edit, is ignored.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muster.errors import say, storage_error
from muster.files import replace_file
from muster.loggers.base import Logger
from muster.redact import redacted_all

NAME = "metrics.jsonl"
TAIL_BYTES = 1 << 16
Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Line(BaseModel):
    """Base of the schemas; further entries are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class Values(Line):
    """A line of numbers; null stands for a value that is not finite."""

    __pydantic_extra__: dict[str, float | None] = Field(init=False)
    kind: str
    step: Whole
    epoch: Whole


class Train(Values):
    loss: float | None
    lr: float | None
    grad_norm: float | None
    samples: Whole
    samples_per_s: float | None


class Event(Line):
    """`time`: seconds since the epoch."""

    event: str
    time: float = 0.0
    step: Whole = 0
    world_size: Whole = 0
    total_steps: Whole = 0


KINDS: dict[str, type[BaseModel]] = {"train": Train, "eval": Values, "event": Event}


class Jsonl(Logger):
    """Appends to metrics.jsonl, after `truncate`. Raises StorageError: the file cannot be opened.

    Lines that a full disk refuses are kept and retried; only failing checkpoints end the run.
    """

    def __init__(self, folder: Path, step: int, *, evaluated: int | None = None):
        path = folder / NAME
        truncate(path, step, evaluated=evaluated)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error("write", error, path) from error
        self._unwritten, self._warned = b"", False

    def log(self, record: dict[str, Any]) -> None:
        self._unwritten += json.dumps(_plain(record)).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                say(f"muster: {storage_error('write metrics.jsonl:', error)}")
            self._warned = True


def append_event(folder: Path, event: str, **details: Any) -> None:
    """Append to an existing metrics.jsonl, even after its logger has closed it. Raises OSError."""
    path = folder / NAME
    if path.exists():
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - 1))
            begin = b"" if file.read(1) in (b"", b"\n") else b"\n"  # the last line was cut short
        record = {"kind": "event", "event": event, "time": round(time.time(), 3), **redacted_all(details)}
        with path.open("ab", buffering=0) as file:
            file.write(begin + json.dumps(_plain(record)).encode() + b"\n")


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def truncate(path: Path, step: int, *, evaluated: int | None = None) -> None:
    """Drop `train` lines after `step` and `eval` lines after `evaluated` (default: `step`), which will be repeated, and invalid lines.

    The file is always a new one: a process that should be gone writes to the old one.
    """
    if path.exists():
        newest = {"train": step, "eval": step if evaluated is None else evaluated}
        begin, lines = tail(path, until=lambda line: line["kind"] == "train" and line["step"] <= min(newest.values()))
        kept = [line for line in lines if line["kind"] not in newest or line["step"] <= newest[line["kind"]]]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        replace_file(path, lambda draft: draft.write_bytes(path.read_bytes()[:begin] + text))


def read(path: Path, kinds: Mapping[str, type[BaseModel]] = KINDS) -> list[dict[str, Any]]:
    """Return all valid lines of metrics.jsonl, or of a file with other `kinds`."""
    return _parsed(path.read_bytes().splitlines() if path.exists() else [], kinds)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the valid `event` lines, without parsing the others."""
    texts = _containing(b'"event"', path.read_bytes()) if path.exists() else []
    return [line for line in _parsed(texts, KINDS) if line["kind"] == "event"]


def begins(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `start` or `resume` event of each attempt among `lines`, except those that found the run finished."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.get("event") in ("start", "resume"):
            found.append(line)
        elif line.get("event") == "done" and "note" in line and len(found) > 1:
            del found[-1]
    return found


def _containing(word: bytes, data: bytes) -> Iterator[bytes]:
    end = 0
    while (at := data.find(word, end)) >= 0:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        yield data[data.rfind(b"\n", 0, at) + 1 : end]


def tail(path: Path, *, until: Callable[[dict[str, Any]], bool]) -> tuple[int, list[dict[str, Any]]]:
    """Return the byte at which they begin, and the last valid lines, at least from the last one for which `until` is true.

    Reading all of a long run's file takes seconds.
    """
    data = path.read_bytes() if path.exists() else b""
    length = TAIL_BYTES
    while True:
        begin = data.rfind(b"\n", 0, len(data) - length) + 1 if length < len(data) else 0
        lines = _parsed(data[begin:].splitlines(), KINDS)
        if not begin or any(map(until, lines)):
            return begin, lines
        length *= 4


def _parsed(texts: Iterable[bytes], kinds: Mapping[str, type[BaseModel]]) -> list[dict[str, Any]]:
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
            if kind := kinds.get(line["kind"]):
                kind.model_validate(line)
        except (ValidationError, ValueError, TypeError, KeyError, RecursionError):
            continue
        lines.append(line)
    return lines


def last_step(folder: Path) -> int:
    """Return the largest logged step; 0 without one."""
    _, lines = tail(folder / NAME, until=lambda line: line["kind"] == "train")
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)
