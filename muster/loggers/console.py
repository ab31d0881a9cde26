"""Console output: a progress bar, or lines for a log."""

from __future__ import annotations

import sys
from typing import Any

from muster.errors import say
from muster.loggers.base import Logger


def console(wanted: str, *, step: int, total_steps: int, restarts: int = 0) -> Logger:
    """Return the logger `wanted`: `bar`, `plain`, `none`, or `auto`, a bar in a terminal and lines elsewhere.

    total_steps: 0 if unknown.
    """
    if wanted == "none":
        return Logger()
    if wanted == "bar" or (wanted == "auto" and sys.stdout.isatty() and total_steps):
        return Bar(step=step, total_steps=total_steps, restarts=restarts)
    return Lines(total_steps)


class Lines(Logger):
    """Prints one line per record."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def log(self, record: dict[str, Any]) -> None:
        say(describe(record, self.total_steps), sys.stdout)


class Bar(Logger):
    """A rich progress bar, with the lines of other records above it.

    restarts: number of earlier attempts at this run.
    """

    def __init__(self, *, step: int, total_steps: int, restarts: int = 0):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.total_steps, self.restarts, self.ranks, self.survived = total_steps, restarts, "", 0
        done = TextColumn("step {task.completed:.0f}/{task.total:.0f}")
        left = (TimeRemainingColumn(compact=True), TextColumn("left"))
        self.bar = Progress(
            done, BarColumn(bar_width=None), *left, TextColumn("{task.description}"), refresh_per_second=5
        )
        self.task = self.bar.add_task("", total=total_steps, completed=step)
        self.bar.start()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def log(self, record: dict[str, Any]) -> None:
        if "world_size" in record:
            self.ranks = several(record["world_size"], "rank")
            if self.restarts:
                self.ranks += f", {several(self.restarts, 'restart')}"
        self.survived += record.get("event") == "survived"
        if record["kind"] == "train":  # shown in the bar, so that the terminal does not scroll
            of_step = (f"loss {record['loss']:.4f}",) if record["loss"] is not None else ()
            speed = (f"{record['samples_per_s']:.0f} samples/s",) if record["samples_per_s"] else ()
            deaths = (f"{several(self.survived, 'death')} survived",) if self.survived else ()
            said = (*of_step, *speed, self.ranks, *deaths)
            self.bar.update(self.task, description=", ".join(said))
        else:
            self.bar.console.print(describe(record, self.total_steps), highlight=False, markup=False)

    def close(self) -> None:
        self.bar.stop()


def several(number: int, what: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


OFTEN = 3
"""The number of deaths of ranks on one host from which on the host is suspected."""
OF_A_STEP = {
    "step": "step {}",
    "epoch": "epoch {}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.3g}",
    "grad_norm": "grad_norm {:.3g}",
    "samples_per_s": "{:.0f} samples/s",
}
"""How the values of a `train` record are shown, in order."""


def describe(record: dict[str, Any], total_steps: int) -> str:
    """Format a record as one readable line. total_steps: 0 if unknown; values that are None are left out."""
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
    if fields["event"] == "restart" and fields.get("after") == "running" and not fields.get("cause"):
        fields |= {
            "after": "killed",
            "cause": "it left no record: killed (kill -9, out of memory), or its host was lost",
        }
    if fields["event"] == "survived":
        died = f"rank {fields['rank']} on {fields['host']} died ({fields['cause']})"
        often = fields.get("deaths_on_host", 1)
        warning = f"; {often} deaths of ranks on this host so far: see its memory and its log" if often >= OFTEN else ""
        return f"survived: {died}, and is born again after {fields['seconds']:.2f} s at step {fields['step']}{warning}"
    details = "  ".join(f"{name}={value}" for name, value in fields.items() if name not in ("event", "time"))
    return f"{fields['event']}: {details}" if details else str(fields["event"])
