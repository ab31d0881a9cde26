"""Compare a checkpoint of the kit with a plain torch.save of the same state: seconds that block training, and in total.

`python -m bench.checkpoint` trains in one process with the kit's own parts. It alternates between turns of the same number
of steps: with a save by the kit in the middle, with `torch.save` there, and without a save. The clock of a turn stops
after its save is complete.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from muster.attempt.lifecycle import Ending, Lifecycle
from muster.faults.preemption import Preemption
from muster.train.config.compose import compose
from muster.train.loop import Run, load, save
from muster.train.run import join, open_run

ROUNDS = int(os.environ.get("ROUNDS", "5"))
WORKLOADS = {
    "mlp, 1 MB": ("model=mlp model.hidden=[512] data=digits optimizer.momentum=0.9", 6),
    "resnet18, momentum": (
        "model=resnet18 data=synthetic data.image_shape=[3,32,32] data.num_samples=1024 batch_size=32 optimizer.lr=0.01",
        6,
    ),
    "mlp, AdamW": (
        "model=mlp model.hidden=[8500,8500] data=synthetic data.image_shape=[1,28,28] batch_size=64 optimizer=adamw",
        6,
    ),
}


class Turns:
    """The steps of one run in turns, with a save in the middle of each."""

    def __init__(self, run: Run, steps: int):
        self.run, self.steps = run, steps
        turns = 3 * ROUNDS + 1
        self._batches = iter(load(run, run.course.plan, range(turns * steps)))

    def turn(self, keep: Callable[[], None], finish: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of the turn until everything is written, and the part of them spent in `keep`."""
        began, blocked = time.perf_counter(), 0.0
        for number in range(self.steps):
            if number == self.steps // 2:
                stood = time.perf_counter()
                keep()
                blocked = time.perf_counter() - stood
            self.run.strategy.step(self.run.step, next(self._batches))
            self.run.progress.step += 1
        finish()
        return time.perf_counter() - began, blocked


def measure(name: str, overrides: str, steps: int, folder: Path) -> list[object]:
    """Return one row of the table."""
    line = [*overrides.split(), f"output_dir={folder}", "max_steps=1000", "log.progress=none", "log.tensorboard=false"]
    config, preemption = compose(line), Preemption()
    world, strategy = join(config, preemption)
    life = Lifecycle(folder, preemption)
    life.meet(world, timeout_s=config.dist.timeout_s)
    plain: list[tuple[float, float]] = []
    kit: list[tuple[float, float]] = []
    none: list[float] = []
    with life, open_run(config=config, world=world, strategy=strategy, life=life) as (run, _):
        turns = Turns(run, steps)
        turns.turn(lambda: save(run), run.running.flush)
        for _ in range(ROUNDS):
            kit.append(turns.turn(lambda: save(run), run.running.flush))
            plain.append(turns.turn(lambda: torch.save(strategy.state(), folder / "plain.pt"), lambda: None))
            none.append(turns.turn(lambda: None, lambda: None)[0])
        size = (folder / "plain.pt").stat().st_size / 1e6
        life.end(Ending())
    if life.exit_code:
        raise SystemExit(life.exit_code)
    blocked = [statistics.median(each[1] for each in which) for which in (kit, plain)]
    ratio = statistics.median(ours[1] / theirs[1] for ours, theirs in zip(kit, plain, strict=True))
    extra = [
        statistics.median(each[0] - alone for each, alone in zip(which, none, strict=True)) for which in (kit, plain)
    ]
    return [
        name,
        f"{size:.0f}",
        *(f"{each:.3f}" for each in blocked),
        f"{ratio:.2f}",
        *(f"{each:.2f}" for each in extra),
    ]


COLUMNS = (
    "state", "MB", "kit blocks, s", "torch.save blocks, s", "ratio", "a turn with the kit's save, s more", "with torch.save",
)  # fmt: skip


def main() -> None:
    """Print one row per state."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("states", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for name in parser.parse_args().states:
        overrides, steps = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as folder:
            print("|", " | ".join(map(str, measure(name, overrides, steps, Path(folder)))), "|", flush=True)
    os._exit(0)  # like the kit: torch's threads may abort during teardown


if __name__ == "__main__":
    main()
