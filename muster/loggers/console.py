"""Console output: a progress bar, or lines for a log."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import say
from muster.loggers.base import Logger
from muster.loggers.jsonl import begins


def console(wanted: str, *, step: int, total_steps: int, earlier: Sequence[dict[str, Any]] = ()) -> Logger:
    """`wanted`: `bar`, `plain`, `none`, or `auto`, a bar in a terminal and lines elsewhere. `total_steps`: 0 if unknown."""
    if wanted == "none":
        return Logger()
    if wanted == "bar" or (wanted == "auto" and sys.stdout.isatty() and total_steps):
        return Bar(step=step, total_steps=total_steps, earlier=earlier)
    return Lines(total_steps)


class Lines(Logger):
    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def log(self, record: dict[str, Any]) -> None:
        say(describe(record, self.total_steps), sys.stdout)


class Bar(Logger):
    """A rich progress bar, with the lines of other records above it. It counts the attempts and deaths in `earlier` records."""

    def __init__(self, *, step: int, total_steps: int, earlier: Sequence[dict[str, Any]] = ()):
        from rich.control import Control
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.segment import ControlType

        self.total_steps, self.size, self.attempts, self.deaths = total_steps, 0, 0, 0
        for record in [*begins(earlier), *(line for line in earlier if line.get("event") == "survived")]:
            self._count(record)
        done = TextColumn("step {task.completed:.0f}/{task.total:.0f}")
        left = (TimeRemainingColumn(compact=True), TextColumn("left"))
        self.bar = Progress(
            done, BarColumn(bar_width=None), *left, TextColumn("{task.description}"), refresh_per_second=5
        )
        self.task = self.bar.add_task(self.ranks, total=total_steps, completed=step)
        if earlier and self.bar.console.is_terminal:  # the bar of a rank 0 that was killed is on this line
            self.bar.console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))
        self.bar.start()

    @property
    def ranks(self) -> str:
        known = [several(self.size, "rank")] if self.size else []
        known += [several(self.attempts - 1, "restart")] if self.attempts > 1 else []
        return ", ".join([*known, *([f"{several(self.deaths, 'death')} survived"] if self.deaths else [])])

    def _count(self, record: dict[str, Any]) -> None:
        self.deaths += record.get("event") == "survived"
        if begins([record]):
            self.size, self.attempts = record["world_size"], self.attempts + 1

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def log(self, record: dict[str, Any]) -> None:
        self._count(record)
        if record["kind"] == "train":  # shown in the bar, so that the terminal does not scroll
            of_step = (f"loss {record['loss']:.4f}",) if record["loss"] is not None else ()
            speed = [OF_A_STEP[name].format(record[name]) for name in speeds(record)]
            said = (*of_step, *speed, self.ranks)
            self.bar.update(self.task, description=", ".join(said))
        else:
            self.bar.console.print(describe(record, self.total_steps), highlight=False, markup=False)

    def close(self) -> None:
        self.bar.stop()


def speeds(record: Mapping[str, Any]) -> list[str]:
    """Return the entries that a bar shows beside the loss; of text, tokens in place of samples."""
    speed = "tokens_per_s" if record.get("tokens_per_s") else "samples_per_s"
    return [name for name in (speed, "mfu", "peak_memory_gib") if record.get(name)]


def several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


MANY = 3
"""Deaths of ranks on one host from which on the host is suspected."""
OFTEN = "; {} deaths of ranks on this host so far: see its memory and its log"
OF_A_STEP = {
    "step": "step {}",
    "epoch": "epoch {}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.3g}",
    "grad_norm": "grad_norm {:.3g}",
    "samples_per_s": "{:.0f} samples/s",
    "tokens_per_s": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.1f} GiB",
}


SILENT_S = 5.0
"""A rank that has made no step for so long may have hung, or been stopped, and ended by its watchdog."""
WATCHED = "; a rank that stands still for timeout_s is ended so"
SURVIVED = "survived: rank {rank} died on {host} ({cause}) and is restarted in place after {seconds:.2f} s, at step {step}; no step is lost"


def cause_of(death: Mapping[str, Any]) -> str:
    """Return how a rank ended, as `survived` records it."""
    cause, silent = str(death["cause"]), death.get("silent", 0.0)
    after = f", {silent:.0f} s after its last step" if silent >= SILENT_S else ""
    return f"{cause}{after}{WATCHED if after and cause == 'SIGKILL' else ''}"


def describe(record: dict[str, Any], total_steps: int) -> str:
    """Format a record as one line. `total_steps`: 0 if unknown; values that are None are left out."""
    fields = {name: value for name, value in record.items() if name != "kind" and value is not None}
    if not fields.get("samples_per_s"):  # a loop of a user's own that does not count samples
        fields.pop("samples_per_s", None)
    if record["kind"] != "event" and total_steps:
        fields["step"] = f"{fields['step']}/{total_steps}"
    if record["kind"] == "train":
        known = [shown.format(fields[name]) for name, shown in OF_A_STEP.items() if name in fields]
        more = [f"{name} {fields[name]:.4f}" for name in fields if name not in (*OF_A_STEP, "samples")]
        return "  ".join([*known, *more])
    if record["kind"] == "eval":
        values = "  ".join(f"{name} {value:.4f}" for name, value in fields.items() if name not in ("step", "epoch"))
        return f"step {fields['step']}  test: {values}"
    if fields["event"] == "restart" and fields.get("after") == "running":
        fields["after"] = "killed"
    if fields["event"] == "survived":
        facts = {"host": "?", "cause": "?", "seconds": 0.0, "rank": "?", "step": "?"} | fields
        often = fields.get("deaths_on_host", 0)
        is_suspect = often >= MANY and not str(facts["cause"]).startswith("hang")
        facts["cause"] = cause_of(facts)
        return SURVIVED.format(**facts) + (OFTEN.format(often) if is_suspect else "")
    details = "  ".join(f"{name}={value}" for name, value in fields.items() if name not in ("event", "time"))
    return f"{fields['event']}: {details}" if details else str(fields["event"])
