"""Strategies beside each other on the same model and data: steps per second, and what a rank has to hold.

`python -m bench.strategies ddp fsdp zero hybrid,shard=2 --nproc 4 --set "model=mlp model.hidden=[1024]"` lets the
strategies take turns in the same processes, so that a busy machine slows all; each turn's ratio to that of the first
strategy is taken, and the median of them. Then each trains alone in fresh processes, whose memory is read. Prints one
line of JSON a strategy, with the figures of the rank that holds most, in MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.steps import Steps, held, size_of

ROUNDS = int(os.environ.get("ROUNDS", "5"))
WORKLOAD = (
    "data=synthetic data.image_shape=[1,28,28] model=mlp model.hidden=[1024,1024,1024] batch_size=64 optimizer=adamw"
)


def overrides(strategy: str) -> list[str]:
    """`hybrid,shard=2` as it stands on a command line."""
    name, *options = strategy.split(",")
    return [f"strategy={name}", *(f"strategy.{option}" for option in options)]


def speed(steps: Iterator[Any], number: int) -> float:
    """Steps per second over `number` steps."""
    started = time.perf_counter()
    for _ in range(number):
        next(steps)
    return number / (time.perf_counter() - started)


def compare(strategies: list[str], workload: list[str], number: int) -> None:
    """On every rank: take turns; rank 0 prints medians by strategy."""
    running = [Steps(*workload, *overrides(each), steps=10**6) for each in strategies]
    turns = [iter(steps) for steps in running]
    for turn in turns:
        speed(turn, 3)  # warm up
    rounds = [[speed(turn, number) for turn in turns] for _ in range(ROUNDS)]
    found = {
        name: {
            "steps_per_s": round(statistics.median(each[place] for each in rounds), 2),
            f"beside_{strategies[0]}": round(statistics.median(each[place] / each[0] for each in rounds), 2),
        }
        for place, name in enumerate(strategies)
    }
    if running[0].world.is_first:
        print(json.dumps(found), flush=True)


def weigh(strategy: str, workload: list[str]) -> None:
    """On every rank: train alone; rank 0 prints the most that a rank held, in MB."""
    Steps(*overrides(strategy), steps=1).losses()  # meet, and import what is needed, on a small model
    before = _reset_peak()
    steps = Steps(*workload, *overrides(strategy), steps=4)
    found: dict[str, int] = {}
    optimizer = steps.strategy.optimizer_step.optimizer  # type: ignore[attr-defined]
    parameters = steps.strategy.optimizer_step.parameters  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients=size_of(p.grad for p in parameters)))
    turn = iter(steps)
    next(turn)
    found["peak_rss_to_first_step"] = _status("VmHWM") - before
    before_more = _reset_peak() - before
    for _ in turn:
        pass
    found["rss"], found["peak_rss_in_steps"] = before_more, _status("VmHWM") - before
    most = [max(each[name] for each in steps.world.gather({**held(steps.strategy), **found})) for name in _names(found)]
    if steps.world.is_first:
        print(
            json.dumps({f"{name}_mb": round(value / 1e6, 1) for name, value in zip(_names(found), most, strict=True)})
        )


def _names(found: dict[str, int]) -> list[str]:
    return ["parameters", "optimizer", *sorted(found)]


def _status(field: str) -> int:
    text = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(text.split()[1]) * 1024


def _reset_peak() -> int:
    """Forget the highest resident memory so far; that of now, in bytes. Linux."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def launch(nproc: int, module: str, *arguments: str) -> Any:
    """What rank 0 of `nproc` processes of `module` prints last."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).resolve().parent.parent)
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        done = subprocess.run(
            [*line, "-m", module, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=__doc__)
    parser.add_argument("strategies", nargs="+", help="names, with options after commas")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps a turn (default: 10)")
    parser.add_argument("--set", default=WORKLOAD, help=f"what is trained (default: {WORKLOAD})")
    parser.add_argument("--worker", choices=["compare", "weigh"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    line = [*given.set.split(), f"output_dir={tempfile.gettempdir()}/unused"]
    if given.worker:
        compare(given.strategies, line, given.steps) if given.worker == "compare" else weigh(given.strategies[0], line)
        os._exit(0)  # as the kit does: torch's threads may abort in a tear-down
    same = [f"--set={given.set}", f"--steps={given.steps}"]
    speeds = launch(given.nproc, "bench.strategies", "--worker=compare", *given.strategies, *same)
    for name in given.strategies:
        weighed = launch(given.nproc, "bench.strategies", "--worker=weigh", name, *same)
        print(json.dumps({"strategy": name, "ranks": given.nproc, **speeds[name], **weighed}), flush=True)


if __name__ == "__main__":
    main()
