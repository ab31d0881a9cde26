"""Measure the cost of saving a large state on each rank: seconds that block training, and additional memory.

`python -m bench.saving fsdp --nproc 4 --set "model=mlp model.hidden=[2048,2048]"` does one step, saves a
checkpoint, writes model.pt, and resumes in new processes. Prints JSON with [seconds, additional MB] of the rank with the
most, and the bytes of its state. Memory is anonymous memory (RssAnon), which no file backs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from bench.steps import WORKLOAD, held, launch, overrides
from muster.attempt.lifecycle import Ending, Lifecycle
from muster.checkpoint.weights import write_weights
from muster.faults.preemption import Preemption
from muster.train.config.compose import compose
from muster.train.loop import load, save
from muster.train.run import join, open_run

EVERY_S = 0.002


class Extra:
    """Measures a block: its duration, and its peak memory minus the memory before it."""

    megabytes = 0.0
    seconds = 0.0

    def __enter__(self) -> Extra:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier would hide new allocations; glibc
        self._before, self._most, self._done = _anonymous(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = round(time.perf_counter() - self._started, 2)
        self._done.set()
        self._watcher.join()
        self.megabytes = round((self._most - self._before) / 1e6, 1)

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            self._most = max(self._most, _anonymous())


def _anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def worker(line: list[str], *, loads: bool) -> None:
    """Do one step, save a checkpoint and write model.pt; with `loads`, resume from it instead. Collective."""
    config, preemption = compose(line), Preemption()
    world, strategy = join(config, preemption)
    life = Lifecycle(Path(config.output_dir), preemption)
    life.meet(world, timeout_s=3600.0)
    found: dict[str, Extra] = {}
    opening = found["open"] = Extra()
    opening.__enter__()
    with life, open_run(config=config, world=world, strategy=strategy, life=life) as (run, folder):
        opening.__exit__()
        if not loads:
            strategy.step(0, next(iter(load(run, run.course.plan, range(1)))))
            run.progress.step = 1
            with found.setdefault("save", Extra()):
                with found.setdefault("blocked", Extra()):
                    save(run)
                run.running.flush()
            with found.setdefault("model_pt", Extra()):
                write_weights(folder.path / "model.pt", strategy.weights(), writes=world.is_first)
        ranks = world.gather(
            {**{name: [each.seconds, each.megabytes] for name, each in found.items()}, **held(strategy)}
        )
        if world.is_first:
            print(json.dumps({name: max(rank[name] for rank in ranks) for name in ranks[0]}), flush=True)
        life.end(Ending())
    os._exit(life.exit_code)  # like the kit: torch's threads may abort during teardown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.saving", description=__doc__)
    parser.add_argument("strategy", help="name, with options after commas")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--set", default=WORKLOAD, help=f"what is trained (default: {WORKLOAD})")
    parser.add_argument("--worker", choices=["save", "resume"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    line = [*given.set.split(), *overrides(given.strategy), f"output_dir={given.folder}", "log.progress=none"]
    if given.worker:
        worker([*line, "max_steps=2", "log.tensorboard=false"], loads=given.worker == "resume")
    with tempfile.TemporaryDirectory() as folder:
        for work in ("save", "resume"):
            same = [f"--set={given.set}", f"--folder={folder}/run"]
            print(
                work,
                json.dumps(launch(given.nproc, "bench.saving", f"--worker={work}", given.strategy, *same)),
                flush=True,
            )


if __name__ == "__main__":
    main()
