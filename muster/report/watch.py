"""`muster report --watch RUN [RUN...]`: show runs in the terminal, from their files alone."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muster import outcome
from muster.code_location import located
from muster.faults import lost_output
from muster.loggers.console import OF_A_STEP, describe, several, speeds
from muster.loggers.jsonl import NAME
from muster.report.failure import command, has_failed, resumes, where
from muster.report.figures import duration
from muster.report.history import History
from muster.timing import timing_file as timing

EVERY_S = 1.0
LEVELS = "▁▂▃▄▅▆▇█"
SILENT_S = 60.0
SPEEDS = 20
"""Timing windows over which speed is averaged."""
STYLES = {"done": "green", "running": "blue", "preempted": "yellow", "none": ""}


def watch(folders: Sequence[Path], *, once: bool = False) -> int:
    """Show the runs until all are done, the output has no reader, or Ctrl-C. Return 0."""
    console = Console()
    if once:
        console.print(Group(*(_surely_shown(folder, console.width) for folder in folders)))
        return 0
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while True:
                is_over = all(map(_is_done, folders))  # looked at first: the last view shows the end
                live.update(Group(*(_surely_shown(folder, console.width) for folder in folders)), refresh=True)
                if is_over or not lost_output.has_reader():
                    return 0
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return 0


def _is_done(folder: Path) -> bool:
    return outcome.read(folder).get("outcome") == outcome.DONE


def _surely_shown(folder: Path, width: int) -> Group:
    try:
        return shown(folder, width)
    except Exception as error:  # records that do not fit each other, or the folder is gone
        return Group(Text.assemble((str(folder), "bold"), f"  cannot be read: {located(error)}"))


def shown(folder: Path, width: int, *, now: float | None = None) -> Group:
    """Return lines about one run: progress, values, and the last event or the error."""
    if not (folder / NAME).exists():
        last = outcome.last(folder)
        state = f"{last.outcome.replace('_', ' ')}: {last.error}" if last.error else f"no {NAME} yet"
        return Group(Text.assemble((str(folder), "bold"), f"  has not started: {state}"))
    history = History.of(folder)
    now = time.time() if now is None else now
    lines: list[RenderableType] = [_how_far(history, now), _how_well(history, width)]
    told = history.events[-1] if history.events else None
    if told:
        ago = f"{duration(max(0.0, now - told['time']))} ago: " if "time" in told else ""
        if has_failed(history):
            lines.append(Text(f"  {where(history)}: {history.outcome.get('error')}", style="red"))
            lines.append(Text(f"  {resumes(history)}{command(history)}", style="dim"))
        else:
            lines.append(Text(f"  {ago}{describe(told, 0)}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _how_far(history: History, now: float) -> Table:
    total = history.total_steps or 0
    table = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, None, None, 1, None):
        table.add_column(ratio=ratio, no_wrap=True)
    table.add_row(
        Text(history.name, style="bold"),
        Text(history.state.replace("_", " "), style=STYLES.get(history.state, "red")),
        f"step {history.step}/{total or '?'}",
        ProgressBar(total=total or None, completed=history.step),
        _left(history, now),
    )
    return table


def _left(history: History, now: float) -> str:
    """Return time left and goodput; the duration if the run does not run."""
    speed, good = _steps_per_s(history), f"goodput {100 * (history.goodput or 0):.0f} %"
    if history.state != "running":
        return f"took {duration(history.seconds)}, {good}" if history.seconds else ""
    if not speed or not history.total_steps:
        return ""
    silent = now - max(_times(history.folder), default=now)
    if silent > SILENT_S:
        return f"no sign of life for {duration(silent)}"
    return f"{duration((history.total_steps - history.step) / speed)} left, {good}"


def _times(folder: Path) -> list[float]:
    return [path.stat().st_mtime for path in (folder / NAME, folder / timing.NAME) if path.exists()]


def _steps_per_s(history: History) -> float | None:
    windows = history.stretches[-1].windows[-SPEEDS:] if history.stretches else []
    seconds = sum(line["seconds"] for line in windows)
    return sum(line["step"] - line["first"] for line in windows) / seconds if seconds else None


def _how_well(history: History, width: int) -> Text:
    losses = [line["loss"] for line in history.train if line["loss"] is not None]
    parts = []
    if losses:
        parts.append(f"loss {losses[-1]:.4g} {sparkline(losses, max(8, min(40, width // 8)))}")
    parts += [
        f"{name} {value:.4g}" for name, value in history.last_values.items() if name != "loss" and value is not None
    ][:2]
    last = history.train[-1] if history.train else {}
    parts += [OF_A_STEP[name].replace("{:.0f}", "{:,.0f}").format(last[name]) for name in speeds(last)]
    if history.world_size:
        parts.append(several(history.world_size, "rank"))
    if history.attempts > 1:
        parts.append(several(history.attempts - 1, "restart"))
    if history.deaths:
        parts.append(f"{several(len(history.deaths), 'death')} survived")
    return Text("  " + "  ".join(parts), no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` characters, each the mean of equally many values. If all are positive, the scale is logarithmic."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    means = [math.log(mean) for mean in means] if min(means) > 0 else means
    low, high = min(means), max(means)
    step = (high - low) / (len(LEVELS) - 1) or 1.0
    return "".join(LEVELS[round((mean - low) / step)] for mean in means)
