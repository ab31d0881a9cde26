"""What a run says while it runs: metrics.jsonl, TensorBoard, and the terminal. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

from train.config.schema import Config, Progress
from train.dist.world import World
from train.errors import say, storage_error
from train.files import replace_file


class Metrics:
    """One JSON object a line, and the same numbers for TensorBoard and the progress display."""

    def __init__(self, folder: Path, *, config: Config, world: World, step: int, samples: int, total_steps: int):
        self.world = world
        self._lock = threading.Lock()  # the checkpoint writer reports from its own thread
        self._since = (samples, time.perf_counter())
        self._board: Any = None
        self._unwritten, self._warned = b"", False
        if not world.is_first:
            return
        path = folder / "metrics.jsonl"
        truncate(path, step)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error("write", error) from error
        self._display = _display(config, total_steps, step)
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def train(self, *, step: int, epoch: int, loss: float, lr: float, grad_norm: float, samples: int) -> None:
        """One `train` line."""
        if self.world.is_first:
            (samples_then, then), now = self._since, time.perf_counter()
            speed = (samples - samples_then) / (now - then)
            self._since = (samples, now)
            self._write(
                "train",
                step=step,
                epoch=epoch,
                loss=loss,
                lr=lr,
                grad_norm=grad_norm,
                samples=samples,
                samples_per_s=round(speed, 1),
            )

    def eval(self, *, step: int, epoch: int, seconds: float, values: dict[str, float]) -> None:
        """One `eval` line. `seconds` is how long it took, which does not count into the training's speed."""
        if self.world.is_first:
            samples, then = self._since
            self._since = (samples, then + seconds)
            self._write("eval", step=step, epoch=epoch, **values)

    def event(self, event: str, **details: Any) -> None:
        """One `event` line: start, resume, checkpoint, preempted, restart, straggler, done and their kin."""
        if self.world.is_first:
            self._write("event", event=event, time=round(time.time(), 3), **details)

    def progress(self, step: int) -> None:
        """Move the progress bar."""
        if self.world.is_first:
            self._display.advance(step)

    def close(self) -> None:
        if not self.world.is_first:
            return
        with self._lock:
            self._display.close()
            self._flush()
            self._file.close()
            if self._board:
                with contextlib.suppress(OSError):
                    self._board.close()

    def _write(self, kind: str, **fields: Any) -> None:
        with self._lock:
            if self._file.closed:  # the run has ended while a checkpoint was being written
                return
            self._unwritten += json.dumps(_plain({"kind": kind, **fields})).encode() + b"\n"
            self._flush()
            self._display.show(kind, fields)
            if self._board and kind != "event":
                with contextlib.suppress(OSError):
                    for name, value in fields.items():
                        if name not in ("step", "epoch", "samples"):
                            self._board.add_scalar(f"{kind}/{name}", value, fields["step"])

    def _flush(self) -> None:
        """Lines that a full disk does not take are kept until it does; the checkpoints decide when that ends the run."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                say(f"muster: {storage_error('write metrics.jsonl:', error)}")
            self._warned = True


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
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
    return max((line["step"] for line in read(folder / "metrics.jsonl") if line["kind"] == "train"), default=0)


class _Plain:
    """Lines for a log."""

    def __init__(self, total: int):
        self.total = total

    def advance(self, step: int) -> None:
        pass

    def show(self, kind: str, fields: dict[str, Any]) -> None:
        say(describe(kind, fields, self.total), sys.stdout)

    def close(self) -> None:
        pass


class _Bar(_Plain):
    """A rich progress bar, with the lines above it."""

    def __init__(self, total: int, done: int):
        super().__init__(total)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = RichProgress(*columns, refresh_per_second=5)
        self.task = self.bar.add_task("training", total=total, completed=done)
        self.bar.start()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def show(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "train":  # the bar carries it: a terminal need not scroll
            self.bar.update(
                self.task,
                description=f"epoch {fields['epoch']}  loss {fields['loss']:.4f}  {fields['samples_per_s']:.0f}/s",
            )
        else:
            self.bar.console.print(describe(kind, fields, self.total), highlight=False, markup=False)

    def close(self) -> None:
        self.bar.stop()


class _Silent(_Plain):
    def show(self, kind: str, fields: dict[str, Any]) -> None:
        pass


def _display(config: Config, total: int, done: int) -> _Plain:
    wanted = config.log.progress
    if wanted is Progress.none:
        return _Silent(total)
    if wanted is Progress.bar or (wanted is Progress.auto and sys.stdout.isatty()):
        return _Bar(total, done)
    return _Plain(total)


def describe(kind: str, fields: dict[str, Any], total: int) -> str:
    """One line for a person."""
    if kind == "train":
        return f"step {fields['step']}/{total}  epoch {fields['epoch']}  loss {fields['loss']:.4f}  lr {fields['lr']:.3g}  grad_norm {fields['grad_norm']:.3g}  {fields['samples_per_s']:.0f} samples/s"
    if kind == "eval":
        values = "  ".join(f"{name} {value:.4f}" for name, value in fields.items() if name not in ("step", "epoch"))
        return f"step {fields['step']}/{total}  epoch {fields['epoch']}  test: {values}"
    details = "  ".join(f"{name}={value}" for name, value in fields.items() if name not in ("event", "time"))
    return f"{fields['event']}: {details}" if details else str(fields["event"])
