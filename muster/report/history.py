"""A run's history, read from its files once. Missing files give empty values, not errors."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from muster import outcome
from muster.dotted_names import flatten
from muster.loggers import jsonl
from muster.redact import redacted_all
from muster.report import results
from muster.report.results import Result
from muster.sample_plan import Plan
from muster.timing import timing_file as timing

Line = dict[str, Any]
LOSSES = ("down", "restart", "survived deaths", "start", "repeated steps", "data wait", "checkpoint", "evaluation")
"""Categories of wall-clock time other than steps that count."""


@dataclass(frozen=True)
class Stretch:
    """One attempt, from timing.jsonl. Times are in seconds since the epoch.

    began: of the process. trained: start of its training loop. ended: its last record. resumed_at: first step.
    facts, windows, end: its lines, by kind.
    """

    began: float
    trained: float
    ended: float
    resumed_at: int
    facts: Line
    windows: list[Line]
    end: Line | None

    @property
    def last_step(self) -> int:
        last: int = max([self.resumed_at, *(line["step"] for line in self.windows), (self.end or {}).get("step", 0)])
        return last


@dataclass(frozen=True)
class History:
    folder: Path
    lines: list[Line]
    timings: list[Line]
    outcome: Line
    config: Line = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> History:
        """Raises OSError."""
        return cls(
            folder=folder,
            lines=jsonl.read(folder / jsonl.NAME),
            timings=jsonl.read(folder / timing.NAME, timing.KINDS),
            outcome=outcome.read(folder),
            config=redacted_all(_config(folder / "config.yaml")),
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def train(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "train"]

    @cached_property
    def evals(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "eval"]

    @cached_property
    def events(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "event"]

    @cached_property
    def begins(self) -> list[Line]:
        """The `start` or `resume` event of each attempt, except those that found the run finished."""
        return jsonl.begins(self.events)

    @cached_property
    def _begun(self) -> set[str]:
        return {line.get("attempt", "") for line in self.of_event("start", "resume")}

    @cached_property
    def _idle(self) -> set[str]:
        """The attempts that found the run finished."""
        return self._begun - {line.get("attempt", "") for line in self.begins}

    @property
    def logs(self) -> list[Path]:
        """The attempts' log files, as far as they are known."""
        found = (stretch.facts.get("environment", {}).get("log") for stretch in self.stretches)
        return [Path(log) for log in dict.fromkeys(found) if log]

    def of_event(self, *names: str) -> list[Line]:
        return [line for line in self.events if line["event"] in names]

    @property
    def total_steps(self) -> int | None:
        return self.begins[-1].get("total_steps") if self.begins else None

    @property
    def world_size(self) -> int | None:
        return self.begins[-1].get("world_size") if self.begins else None

    @property
    def step(self) -> int:
        return max([line["step"] for line in (*self.train, *self.evals)], default=0)

    @property
    def state(self) -> str:
        """Outcome in outcome.json, such as done or failed; `none` without one."""
        return str(self.outcome.get("outcome") or "none")

    @cached_property
    def last_values(self) -> dict[str, float]:
        last = self.evals[-1] if self.evals else {}
        return {name: value for name, value in last.items() if name not in ("kind", "step", "epoch")}

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The attempts in timing.jsonl, except those that found the run finished."""
        found: list[Stretch] = []
        for at, line in enumerate(self.timings):
            if line["kind"] != "attempt":
                continue
            rest = self.timings[at + 1 :]
            own = rest[: next((n for n, other in enumerate(rest) if other["kind"] == "attempt"), len(rest))]
            if line.get("attempt") in self._idle:
                continue
            windows = [other for other in own if other["kind"] == "window"]
            end = next((other for other in own if other["kind"] == "end"), None)
            ended = own[-1]["time"] if own else line["time"]
            found.append(Stretch(line["began"], line["time"], ended, line["step"], line, windows, end))
        return found

    @cached_property
    def seconds(self) -> float:
        """Seconds from the start of the first process to the run's last record."""
        return max(0.0, self.stretches[-1].ended - self.stretches[0].began) if self.stretches else 0.0

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds by category: `steps` that count, and LOSSES. They add up to `seconds`."""
        spent = dict.fromkeys(("steps", *LOSSES), 0.0)
        for at, stretch in enumerate(self.stretches):
            before = self.stretches[at - 1] if at else None
            if before and not self._is_survival(stretch):
                spent["down"] += max(0.0, stretch.began - before.ended)
            if not self._is_survival(stretch):
                spent["restart" if before else "start"] += max(0.0, stretch.trained - stretch.began)
            kept = min((later.resumed_at for later in self.stretches[at + 1 :]), default=stretch.last_step)
            for line in (*stretch.windows, *([stretch.end] if stretch.end else [])):
                steps = line["step"] - line["first"]
                again = min(1.0, max(0, line["step"] - max(kept, line["first"])) / steps) if steps else 0.0
                data = min(line["seconds"], max(line.get("data", [0.0]), default=0.0))
                own = max(0.0, line["seconds"] - data - line["evaluation"] - line["checkpoint"])
                spent["evaluation"] += line["evaluation"]
                spent["checkpoint"] += line["checkpoint"]
                spent["repeated steps"] += again * (own + data)
                spent["data wait"] += (1 - again) * data
                spent["steps"] += (1 - again) * own
        spent["survived deaths"] += min(self._survived_s, max(0.0, self.seconds - sum(spent.values())))
        spent["steps"] += max(0.0, self.seconds - sum(spent.values()))  # gaps between the lines' clocks
        return spent

    def _is_survival(self, stretch: Stretch) -> bool:
        """True if `stretch` is no attempt of its own: a rank was restarted in place, and the run goes on with the live state."""
        return stretch.trained in self._restarts_in_place and stretch.facts.get("attempt") not in self._begun

    @cached_property
    def _restarts_in_place(self) -> set[float]:
        """Begin of each stretch that was the newest when a death was noted: one in rank 0's place, or anew, as by a Job."""
        began = [stretch.trained for stretch in self.stretches]
        times = [line["time"] for line in self.deaths if "time" in line]
        return {began[bisect(began, then) - 1] for then in times if began and then >= began[0]}

    @cached_property
    def _survived_s(self) -> float:
        """Seconds for which deaths stopped training, from the last step of the rank; ranks that died at one step were restarted together."""
        longest: dict[int, float] = {}
        for line in self.deaths:
            step = line["step"]
            longest[step] = max(longest.get(step, 0.0), line.get("seconds", 0.0) + line.get("silent", 0.0))
        return sum(longest.values())

    @property
    def attempts(self) -> int:
        return len(self.begins) or sum(not self._is_survival(stretch) for stretch in self.stretches)

    @property
    def deaths(self) -> list[Line]:
        """The deaths of ranks that were restarted in place."""
        return self.of_event("survived")

    @property
    def goodput(self) -> float | None:
        """Share of time in steps that count, from 0 to 1; None without recorded times."""
        return self.spent["steps"] / self.seconds if self.seconds else None

    @cached_property
    def by_rank(self) -> list[dict[str, float]]:
        """Seconds of each rank in the last attempt: `compute`, `data` (waits for data), `wait` (for other ranks)."""
        if not self.stretches or not (windows := self.stretches[-1].windows):
            return []
        found = [dict.fromkeys(("compute", "data", "wait"), 0.0) for _ in windows[-1]["data"]]
        for line in windows:
            for rank, (data, wait) in enumerate(zip(line["data"], line["wait"], strict=True)):
                rest = line["seconds"] - line["evaluation"] - line["checkpoint"] - data - wait
                for name, value in (("compute", max(0.0, rest)), ("data", data), ("wait", wait)):
                    found[rank][name] += value
        return found

    @property
    def hosts(self) -> list[str]:
        """Of each rank of the last attempt."""
        facts = self.stretches[-1].facts if self.stretches else {}
        return [facts["hosts"][number] for number in facts.get("host_of_rank", ())]

    def time_of(self, step: int) -> float | None:
        """Return when `step` was last done, interpolated, in seconds since the run began; None without recorded times."""
        known, times = self._clock
        if not known:
            return None
        at = bisect(known, step)
        if at == 0 or at == len(known):
            return times[0 if at == 0 else -1]
        share = (step - known[at - 1]) / (known[at] - known[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    @cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        """Steps and times; of a repeated step the later one."""
        times: dict[int, float] = {}
        zero = self.stretches[0].began if self.stretches else 0.0
        for stretch in self.stretches:
            times = {step: then for step, then in times.items() if step < stretch.resumed_at}
            times[stretch.resumed_at] = stretch.trained - zero
            times |= {line["step"]: line["time"] - zero for line in stretch.windows}
        return sorted(times), [times[step] for step in sorted(times)]

    @cached_property
    def ledger(self) -> tuple[bool | None, str]:
        """Whether the samples on record match the plan and no step is there twice (None: unknown); and a summary."""
        size = next((line["samples_per_epoch"] for line in self.events if "samples_per_epoch" in line), None)
        if not size or not self.train or "batch_size" not in self.config:
            return None, "not known: there are no steps on record"
        plan = _plan(size, self.config)
        steps = [line["step"] for line in self.train]
        wrong = [line["step"] for line in self.train if line["samples"] != plan.samples_before(line["step"])]
        twice = [b for a, b in pairwise(steps) if b <= a]
        again = sum(stretch.last_step - after.resumed_at for stretch, after in pairwise(self.stretches))
        seen = f"{self.train[-1]['samples']:,} samples in {steps[-1]:,} steps"
        made_again = f"; {again:,} steps were begun by two attempts, and count once" if again > 0 else ""
        if wrong or twice:
            return False, f"{seen}; step {(wrong + twice)[0]} does not fit the plan of {size:,} samples an epoch"
        return True, f"{seen}, as planned, each once{made_again}"


def _config(path: Path) -> Line:
    try:
        found = yaml.safe_load(path.read_bytes()) if path.exists() else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def ranked(histories: Sequence[History]) -> list[History]:
    of = {id(result := Result.of(history.folder, history.lines)): (history, result) for history in histories}
    return [of[id(each)][0] for each in results.ranked([result for _, result in of.values()])]


UNTOLD = ("name", "output_dir")


def differing(histories: list[History]) -> dict[str, list[Any]]:
    """Return key -> each run's value, where values differ, except names, folders and `log.`. A run without a config differs in none."""
    flats = [flatten(history.config) for history in histories]
    names = dict.fromkeys(name for each in flats for name in each if name not in UNTOLD and not name.startswith("log."))
    found = {name: [each.get(name) for each in flats] for name in names}
    known = [number for number, each in enumerate(flats) if each]
    return {name: values for name, values in found.items() if any(values[n] != values[known[0]] for n in known)}


def _plan(size: int, config: Mapping[str, Any]) -> Plan:
    drop_last = bool((config.get("loader") or {}).get("drop_last"))
    return Plan(size, min(int(config["batch_size"]), size), drop_last=drop_last)
