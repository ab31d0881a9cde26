"""metrics.jsonl: one JSON object a line, the record that all else is made of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from train.errors import say, storage_error
from train.files import replace_file
from train.loggers.base import Logger

NAME = "metrics.jsonl"


class Jsonl(Logger):
    """Appends to `folder`/metrics.jsonl, from which the lines after `step` are dropped first: they will be made again.

    Lines that a full disk does not take are kept until it does; the checkpoints decide when that ends the run.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, folder: Path, step: int):
        path = folder / NAME
        truncate(path, step)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error("write", error) from error
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


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def truncate(path: Path, step: int) -> None:
    """Drop the `train` and `eval` lines after `step`, which will be made again, and a line cut short by a kill."""
    if path.exists():
        kept = [line for line in read(path) if line["kind"] == "event" or line["step"] <= step]
        replace_file(path, lambda draft: draft.write_text("".join(json.dumps(line) + "\n" for line in kept)))


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl that are whole."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # a writer was killed in the middle of it
    return lines


def last_step(folder: Path) -> int:
    """The furthest step that any attempt in `folder` has logged."""
    return max((line["step"] for line in read(folder / NAME) if line["kind"] == "train"), default=0)
