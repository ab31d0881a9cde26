"""Compare a training loop with `muster.Job` in it and the same loop without it: ratios of steps per second.

`python -m bench.own_loop [W1 ...]` starts itself under torchrun with one and with two processes, on the workloads of
`bench.loop`. Both loops train the same model with DDP and SGD on tensors in memory. The loop by hand is that of PyTorch's
DDP tutorial and keeps nothing. The loop with Job logs every 10 steps, also to TensorBoard, and saves a checkpoint every
100 steps; it takes its samples from `job.batches(dataset)`, or from the loader of the loop by hand. The two alternate in
the same processes, so that other load slows both; the result is the median of the ratios of each turn. The ratio of the
processor time of a step says more on a busy machine: it counts no waiting, neither for the other rank nor for a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import muster
from bench.loop import NOISY, ROUNDS, WORKLOADS, Plain, Workload, by_hand, loader_of, loss_of, rows_of
from muster.train.config.compose import compose
from muster.train.config.parts import build

COLUMNS = (
    "workload",
    "processes",
    "batches",
    "with Job, steps/s",
    "by hand",
    "with Job / by hand",
    "processor time, with Job / by hand",
    "spread by hand",
)
SOURCES = ("the job's", "the loader's")


def with_job(
    job: muster.Job, model: nn.Module, dataset: Plain, batch: int, *, source: str, steps: int
) -> Iterator[None]:
    """The loop by hand with Job; yields after each step."""
    wrapped = DistributedDataParallel(model) if job.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=wrapped, optimizer=optimizer)
    if source == SOURCES[0]:
        batches = job.batches(dataset, batch_size=batch * job.world_size, max_steps=steps)
    else:
        sampler = DistributedSampler(dataset, job.world_size, job.rank)
        batches = job.batches(loader_of(dataset, sampler, batch), max_steps=steps)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), labels)
        loss.backward()
        optimizer.step()
        job.step(loss=loss)
        yield


def turn(loop: Iterator[None], steps: int) -> tuple[float, float]:
    """Return the steps/s of a loop's next `steps` steps, and their seconds of processor time, of all threads."""
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(loop)
    return steps / (time.perf_counter() - began), time.process_time() - worked


def measure(workload: Workload, source: str, folder: str) -> tuple[bool, list[object]]:
    """Return whether this rank is the first, and a row of the table. Collective: every rank must call it."""
    of_a_turn = int(os.environ.get("STEPS", workload.steps))
    config, dataset = compose([*workload.overrides]), Plain(workload)
    models = [build(config.model, input_shape=workload.shape, num_classes=workload.classes) for _ in range(2)]
    with muster.Job(folder, timeout_s=3600) as job:
        loops = (
            with_job(job, models[0], dataset, workload.batch, source=source, steps=of_a_turn * (ROUNDS + 1)),
            by_hand(models[1], dataset, workload.batch),
        )
        turns = [[turn(loop, of_a_turn) for loop in loops] for _ in range(ROUNDS + 1)][1:]  # the first warms up
        next(loops[0], None)
        ranks, is_first = job.world_size, job.is_first
    return is_first, [workload.name, ranks, source, *compared(turns)]


def compared(turns: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the last five columns, from the (steps/s, processor time) of both loops in each turn."""
    with_it, by_itself = ([each[side][0] for each in turns] for side in (0, 1))
    ratio = statistics.median(one / other for (one, _), (other, _) in turns)
    work = statistics.median(one / other for (_, one), (_, other) in turns)
    speeds = [statistics.median(with_it), statistics.median(by_itself)]
    spread = (max(by_itself) - min(by_itself)) / speeds[1]
    return [*(round(each, 1) for each in speeds), round(ratio, 3), round(work, 3), round(spread, 2)]


def worker(chosen: Sequence[str]) -> None:
    pairs = [(workload, source) for workload in WORKLOADS if workload.name[:2] in chosen for source in SOURCES]
    for number, (workload, source) in enumerate(pairs):
        is_first, row = measure(workload, source, f"{os.environ['BENCH_DIR']}/{number}-{os.environ['WORLD_SIZE']}")
        if is_first:
            print(f"\nrow {json.dumps(row)}", flush=True)


def main() -> None:
    """Run the workloads with one and two processes; print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.own_loop", description=__doc__)
    names = [workload.name[:2] for workload in WORKLOADS]
    parser.add_argument("workloads", nargs="*", default=names, choices=[*names, names], help="default: all")
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for processes in given.nproc:
        for row in rows_of(processes, given.workloads, module="bench.own_loop"):
            print("|", " | ".join(map(str, row)), "|", flush=True)
            if row[-1] > NOISY:
                print(
                    f"A noisy machine: the turns by hand differ by more than {NOISY:.0%}.", file=sys.stderr, flush=True
                )


if __name__ == "__main__":
    worker(sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main()
