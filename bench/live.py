"""The cost per step of timing each rank: `python -m bench.live [ranks]`.

Times the calls that a step makes for it, some thousand times, with a log line every 10 steps, the default. For
comparison it times a step of a very small workload (an MLP 784-512-10 with 64 samples per rank), so the share that it
prints is an upper bound for larger ones.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from muster.timing.clock import Clock, gathered, spread
from muster.timing.timing_file import Timing
from muster.world.environment import Environment
from muster.world.exposed_communication import Waiting
from muster.world.group import World

STEPS, EVERY, ROUNDS = 5000, 10, 5
MLP = (
    "model=mlp",
    "data=synthetic",
    "data.image_shape=[1,28,28]",
    "batch_size=64",
    "max_steps=600",
    "eval.every_steps=off",
)


def watching(ranks: int, folder: Path) -> float:
    """Return the seconds per step of the timing calls, on rank 0 of `ranks`."""
    environment = Environment.from_env("env://")
    world = World(environment, torch.device("cpu"), "bench", None, [])  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(torch.zeros(()))
    waiting = Waiting(world, [parameter])
    clock, record = Clock(waiting.read), Timing(folder, hosts=["host"] * ranks, attempt="bench", step=0)
    items = clock.waiting([0] * STEPS)
    clock.begin()
    began = time.perf_counter()
    for step, _ in enumerate(items, 1):
        waiting.begin()
        waiting._arrived(parameter)  # the autograd hook of one parameter
        waiting.end()
        if step % EVERY == 0 and clock.is_due(ranks):
            record.add(step, gathered(spread(clock.read(), rank=0, size=ranks)))
    return (time.perf_counter() - began) / STEPS


def step_of_an_mlp(folder: Path) -> float:
    """Return the seconds per step of the MLP in the kit."""
    line = [sys.executable, "-m", "train", *MLP, f"output_dir={folder}", "log.tensorboard=false", "log.report=false"]
    subprocess.run(line, check=True, capture_output=True)
    from muster.report.history import History

    speeds = [line["samples_per_s"] for line in History.of(folder).train[5:]]
    return 64 / statistics.median(speeds)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as place:
        pairs = []
        for number in range(ROUNDS):
            folder = Path(place, str(number))
            pairs.append((watching(ranks, Path(place)), step_of_an_mlp(folder)))
        cost, step = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = statistics.median(one / other for one, other in pairs)
    print(f"{ranks} ranks: {cost * 1e6:.1f} µs a step for watching, {step * 1e6:.0f} µs for the step: {share:.2%}")


if __name__ == "__main__":
    main()
