"""The samples of each step, as recorded by the model: one line per forward pass, one file per process."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One rank's part of one step. attempt: an id that the ranks of one group share."""

    time: float
    attempt: str
    rank: int
    pid: int
    step: int
    samples: list[int]


def write(*, step: int, samples: list[int]) -> None:
    """Append a line to the file of this process in the folder that LEDGER names."""
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    line = Line(time.time(), attempt, int(os.environ.get("RANK", "0")), os.getpid(), step, samples)
    with Path(os.environ["LEDGER"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(vars(line)) + "\n")


class Ledger:
    """The lines in `folder`, read incrementally."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines: list[Line] = []
        self._read: dict[Path, int] = {}

    @property
    def lines(self) -> list[Line]:
        """All complete lines so far."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                self._lines += [Line(**json.loads(text)) for text in whole.splitlines()]
        return self._lines

    def furthest(self) -> int:
        """The largest step begun so far; -1 before the first."""
        return max((line.step for line in self.lines), default=-1)

    def rank(self, rank: int) -> int:
        """Return the pid of `rank` in the newest attempt."""
        return max((line for line in self.lines if line.rank == rank), key=lambda line: line.time).pid

    def attempts(self) -> set[str]:
        return {line.attempt for line in self.lines}


def samples_by_step(lines: Iterable[Line]) -> dict[int, list[int]]:
    """Return for each step the sorted samples of the last attempt at it: those that the final weights have seen.

    Of a rank that begins a step again in the same attempt, since another one has died, the last line counts.
    """
    last: dict[int, Line] = {}
    lines = sorted(lines, key=lambda line: line.time)
    for line in lines:
        last[line.step] = line
    parts = {(line.step, line.rank): line.samples for line in lines if line.attempt == last[line.step].attempt}
    found: dict[int, list[int]] = {step: [] for step in sorted(last)}
    for (step, _), samples in parts.items():
        found[step] += samples
    return {step: sorted(samples) for step, samples in found.items()}


def steps_repeated(lines: Iterable[Line]) -> int:
    """Count the steps that a later attempt has begun again."""
    begun = {(line.attempt, line.step) for line in lines}
    return len(begun) - len({step for _, step in begun})


def seconds_to_next(lines: Iterable[Line], fault: float) -> float | None:
    """Return the seconds from a fault until all ranks that then train have begun a new step; None if none has."""
    lines = list(lines)
    furthest = max((line.step for line in lines if line.time <= fault), default=-1)
    begun: dict[int, float] = {}
    for line in sorted(lines, key=lambda line: line.time):
        if line.time > fault and line.step > furthest:
            begun.setdefault(line.rank, line.time)
    return max(begun.values()) - fault if begun else None


def seconds_per_step(lines: Iterable[Line]) -> float:
    """Return the mean seconds per step of an undisturbed run, from its first step to its last."""
    times = [line.time for line in lines if line.rank == 0]
    return (max(times) - min(times)) / max(1, len(times) - 1)


def differing(reference: list[int], found: list[int]) -> tuple[int, int]:
    """Return the number of surplus entries in `found` and of missing entries of `reference`."""
    expected, got = Counter(reference), Counter(found)
    return (got - expected).total(), (expected - got).total()
