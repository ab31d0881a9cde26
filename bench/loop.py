"""Compare the kit as a user starts it with training scripts by hand: steps per second, start and memory.

`python -m bench.loop [W1 ...] [--data plain ...] [--trainers kit by_hand ...]` runs torchrun with one and with two processes for
each trainer in turn (bench/trainers.py), on the same models and data (bench/workloads.py). The kit runs with its defaults
and keeps what a user's run keeps: a line every 10 steps, also to TensorBoard, and a checkpoint every 100. Speed is
measured in two windows: the first ten seconds from the first step, and the ten after them. All figures are medians over
the turns; a ratio is the median of each turn's ratio to the loop by hand in the same turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from bench.trainers import TRAINERS
from bench.workloads import CLOCK, KINDS, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = int(os.environ.get("ROUNDS", "3"))
WINDOW_S = float(os.environ.get("WINDOW_S", "10"))
PATIENCE_S = 120
"""The longest wait for a first step."""
MOST_STEPS = 1_000_000
KIT, BY_HAND = "kit", "by_hand"
NOISY = 0.2
"""Where the loop by hand's own turns differ by more than so much of their median, the machine had other things to do."""


class Figures(NamedTuple):
    """What a turn measures: seconds from the command to the first step, steps/s in both windows, the most memory of a process."""

    start_s: float
    first: float
    then: float
    memory_mb: float


def words_of(trainer: str, of: str, kind: str, ranks: int, folder: str) -> list[str]:
    """Return the module and the arguments that torchrun starts."""
    if trainer != KIT:
        return ["bench.trainers", trainer, of, kind, folder]
    workload = WORKLOADS[of]
    parts = ["model._target_=bench.workloads.model", f"+model.name={of}", f"objective={workload.objective}"]
    parts += [f"data._target_=bench.workloads.{KINDS[kind].__name__}", f"+data.of={of}"]
    every = ["log.every_steps=10", "checkpoint.every_steps=100", "eval.every_steps=off", f"max_steps={MOST_STEPS}"]
    return [
        "train",
        *parts,
        *every,
        f"batch_size={workload.batch * ranks}",
        "optimizer.lr=0.01",
        f"output_dir={folder}",
    ]


def turn(trainer: str, of: str, kind: str, ranks: int) -> Figures:
    """Run a trainer until both windows are over."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder, "clock")
        clock.touch()
        os.truncate(clock, 8 * MOST_STEPS)
        times = np.memmap(clock, dtype="f8", mode="r")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, CLOCK: str(clock), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        line += words_of(trainer, of, kind, ranks, f"{folder}/run")
        began = time.monotonic()
        with Path(folder, "output").open("w+") as output:
            child = subprocess.Popen(line, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while child.poll() is None and not times[0] and time.monotonic() < began + PATIENCE_S:
                    time.sleep(0.05)
                while child.poll() is None and time.monotonic() < times[0] + 2 * WINDOW_S:
                    time.sleep(0.2)
                if child.returncode is not None or not times[0]:
                    output.seek(0)
                    sys.exit(f"{trainer} has ended, or made no step:\n{output.read()[-3000:]}")
                memory = max(each.memory_info().rss for each in psutil.Process(child.pid).children(recursive=True))
            finally:
                end(child)
        made = np.array(times[: int(np.count_nonzero(times))])
    half = np.searchsorted(made, made[0] + WINDOW_S)
    windows = made[:half], made[half : np.searchsorted(made, made[0] + 2 * WINDOW_S)]
    first, then = (float((len(each) - 1) / (each[-1] - each[0])) for each in windows)
    return Figures(float(made[0]) - began, first, then, memory / 1e6)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a trainer as a launcher does, with all of its processes."""
    everyone = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
    for each in psutil.wait_procs(everyone, timeout=5)[1]:
        each.kill()


COLUMNS = (
    *("workload", "data", "processes", "trainer", "to the first step, s", "first 10 s, steps/s", "then, steps/s"),
    *("memory, MB", "start / by hand", "first / by hand", "then / by hand", "memory / by hand", "spread"),
)


def rows(turns: Sequence[dict[str, Figures]]) -> dict[str, list[str]]:
    """Return the cells from the fifth on, by trainer."""
    cells = {}
    for trainer in turns[0]:
        columns = list(zip(*(each[trainer] for each in turns), strict=True))
        figures = [statistics.median(column) for column in columns]
        ratios = [
            statistics.median(each[trainer][at] / each[BY_HAND][at] for each in turns) if BY_HAND in turns[0] else 1
            for at in range(len(columns))
        ]
        spread = (max(columns[2]) - min(columns[2])) / figures[2]
        cells[trainer] = [*(f"{each:,.1f}" for each in figures[:3]), f"{figures[3]:,.0f}", *(f"{each:.2f}" for each in ratios), f"{spread:.2f}"]  # fmt: skip
    return cells


def main() -> None:
    """Run the workloads; print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), choices=[*WORKLOADS, list(WORKLOADS)])
    parser.add_argument("--data", nargs="+", default=["plain"], choices=KINDS, help="data sets (default: plain)")
    parser.add_argument("--trainers", nargs="+", default=[KIT, BY_HAND], choices=[KIT, *TRAINERS])
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    given = parser.parse_args()
    for name in {"accelerate", "lightning"} & {*given.trainers}:
        if not importlib.util.find_spec(name):
            sys.exit(f"{name} is not installed: pip install . --group conformance")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    noisy = []
    for ranks, of, kind in ((n, of, kind) for n in given.nproc for of in given.workloads for kind in given.data):
        turns = [{each: turn(each, of, kind, ranks) for each in given.trainers} for _ in range(ROUNDS)]
        for trainer, cells in rows(turns).items():
            print("|", " | ".join([of, kind, str(ranks), trainer, *cells]), "|", flush=True)
            if trainer == BY_HAND and float(cells[-1]) > NOISY:
                noisy.append(f"{of} {kind} with {ranks}")
    if noisy:
        print(f"\nA noisy machine: the turns by hand differ by more than {NOISY:.0%} in {', '.join(noisy)}.")


if __name__ == "__main__":
    main()
