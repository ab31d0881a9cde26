"""Compare the kit's loop with two hand-written loops on the same model and data: ratios of steps per second.

`python -m bench.loop [W1 ...] [--data plain ...] [--peers]` starts itself under torchrun with one and with two processes. The kit trains
with its own loop and its defaults: it logs every 10 steps, also to TensorBoard, shows its progress, and saves a
checkpoint every 100 steps. The hand-written loops are that of PyTorch's DDP tutorial (DataLoader, DistributedSampler,
DDP), and a bare one without data loader, DDP and log, in which processes do not communicate. The data are tensors in
memory: a plain data set of single samples unless `--data` says otherwise, which the bare loop alone reads by the batch.
The three alternate in the same processes, so that other load slows all of them; the result
is the median of the ratios of each turn. With --peers other installed trainers take turns, too (bench/peers.py).
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from bench.peers import Loop, installed
from muster.attempt.lifecycle import Lifecycle
from muster.faults.preemption import Preemption
from muster.sample_plan import Plan
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.data.load import Data
from muster.train.loop import train
from muster.train.run import join, open_run

ROUNDS = int(os.environ.get("ROUNDS", "5"))
RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parent / "results"))
SAMPLES = 10_000
AS_A_USER = (
    "log.every_steps=10",
    "log.progress=plain",
    "checkpoint.every_steps=100",
    "eval.every_steps=off",
    "dist.timeout_s=3600",
)


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    shape: of a sample. classes: number of labels or tokens. batch: samples per rank and step. steps: per turn.
    """

    name: str
    overrides: tuple[str, ...]
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int


WORKLOADS = (
    Workload("W1: mlp 784-512-10, 64 a rank", ("model=mlp", "data=synthetic", "data.image_shape=[1,28,28]"), (1, 28, 28), 10, 64, 300),
    Workload("W2: resnet18, 3x32x32, 32 a rank", ("model=resnet18", "data=synthetic", "data.image_shape=[3,32,32]"), (3, 32, 32), 10, 32, 6),
    Workload(
        "W3: gpt, 4 layers, width 128, 128 tokens, 8 a rank", ("model=gpt", "objective=language_modeling", "data=text"), (128,), 256, 8, 12
    ),
)  # fmt: skip


class Plain(Dataset[Any]):
    """Tensors in memory, uint8 images and labels, or tokens and next tokens: as most data sets, one sample at a time."""

    collate: Any = None

    def __init__(self, workload: Workload):
        self.is_text = len(workload.shape) == 1
        size, same = (SAMPLES, *workload.shape), torch.Generator().manual_seed(0)  # on each rank
        largest = workload.classes if self.is_text else 256
        self.inputs = torch.randint(0, largest, size, dtype=torch.uint8, generator=same)
        self.labels = torch.randint(0, workload.classes, size if self.is_text else size[:1], generator=same)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        return inputs.long() if self.is_text else inputs.float() / 255, self.labels[index]


class Batched(Plain):
    """Reads samples together by torch's `__getitems__`, as `Subset` and Hugging Face's data sets do."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self[indices], strict=True))


class Keyed(Plain):
    """Gives a whole batch by the kit's `__getitems__`; for the other loops the collate function does nothing."""

    collate = staticmethod(lambda batch: batch)

    def __getitems__(self, indices: Sequence[int] | Tensor, keys: Any = None) -> tuple[Tensor, Tensor]:
        return self[indices]


class Random(Plain):
    """Draws for each sample, as random augmentation does: a flip of images and a shift, or dropped tokens."""

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = super().__getitem__(index)
        if self.is_text:
            return inputs.masked_fill(torch.rand(inputs.shape) < 0.1, 0), labels
        inputs = inputs.flip(-1) if torch.rand(()) < 0.5 else inputs
        return inputs.roll(int(torch.randint(-2, 3, ())), -1), labels


KINDS: dict[str, type[Plain]] = {"plain": Plain, "batched": Batched, "keyed": Keyed, "random": Random}


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


def by_hand(model: nn.Module, dataset: Plain, batch: int) -> Iterator[None]:
    """The loop of PyTorch's DDP tutorial; yields after each step."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = DistributedSampler(dataset, world_size, dist.get_rank() if world_size > 1 else 0)
    loader = loader_of(dataset, sampler, batch)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(wrapped(inputs), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                loss.item()
            yield


def loader_of(dataset: Plain, sampler: DistributedSampler[Any], batch: int) -> DataLoader[Any]:
    """Return a loader of the sampler's samples."""
    batches = BatchSampler(sampler, batch, drop_last=True)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate)


def bare(model: nn.Module, dataset: Plain, batch: int) -> Iterator[None]:
    """A loop of only model and optimizer; yields after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        for indices in torch.randperm(SAMPLES).split(batch)[:-1]:
            optimizer.zero_grad()
            inputs, labels = Plain.__getitem__(dataset, indices)
            loss_of(model(inputs), labels).backward()
            optimizer.step()
            yield


class InTurns:
    """A strategy that stops the clock at fixed intervals, for the turns of the other loops."""

    def __init__(self, strategy: Any, others: Sequence[Iterator[None]], steps: int):
        self.strategy, self.others, self.steps = strategy, others, steps
        self.turns: list[list[float]] = []
        self._done, self._since = 0, time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def step(self, step: int, batches: list[Any]) -> Any:
        if self._done == self.steps:
            mine = time.perf_counter() - self._since
            self.turns.append([self.steps / each for each in (mine, *(self._turn(other) for other in self.others))])
            self._done, self._since = 0, time.perf_counter()
        self._done += 1
        return self.strategy.step(step, batches)

    def _turn(self, loop: Iterator[None]) -> float:
        began = time.perf_counter()
        for _ in range(self.steps):
            next(loop)
        return time.perf_counter() - began


def measure(workload: Workload, kind: str, folder: str) -> tuple[bool, list[Any]]:
    """Return whether this rank is the first, and a row of the table. Collective: every rank must call it."""
    ranks = int(os.environ["WORLD_SIZE"])
    of_a_turn = int(os.environ.get("STEPS", workload.steps))
    steps = of_a_turn * (ROUNDS + 1) + 1  # the first turn warms up
    line = [*workload.overrides, *AS_A_USER, "optimizer.lr=0.01", f"max_steps={steps}", f"output_dir={folder}"]
    config = compose([*line, f"batch_size={workload.batch * ranks}"])
    preemption = Preemption()
    world, strategy = join(config, preemption)
    life = Lifecycle(Path(folder), preemption)
    life.meet(world, timeout_s=config.dist.timeout_s)
    with life, open_run(config=config, world=world, strategy=strategy, life=life) as (opened, _):
        dataset = KINDS[kind](workload)
        data = Data(dataset, None, workload.classes, "bench")
        model = partial(build, config.model, input_shape=workload.shape, num_classes=workload.classes)
        others = [by_hand(model(), dataset, workload.batch), bare(model(), dataset, workload.batch)]
        others += [peer(model(), dataset, workload.batch, loss_of) for peer in chosen_peers().values()]
        turns = InTurns(strategy, others, of_a_turn)
        course = replace(opened.course, data=data, plan=Plan(SAMPLES, config.batch_size))
        life.end(train(replace(opened, course=course, strategy=turns)))  # type: ignore[arg-type]
    if life.exit_code:
        raise SystemExit(life.exit_code)
    kept = turns.turns[1:]
    speeds = [round(statistics.median(column), 1) for column in zip(*kept, strict=True)]
    ratios = [round(statistics.median(kit / turn[at] for kit, *turn in kept), 2) for at in range(len(others))]
    hand = round(statistics.median(turn[1] / turn[2] for turn in kept), 2)
    alone = sorted(turn[2] for turn in kept)
    spread = round((alone[-1] - alone[0]) / statistics.median(alone), 2)
    return world.is_first, [workload.name, kind, ranks, *speeds, *ratios, hand, spread]


def chosen_peers() -> dict[str, Loop]:
    return installed() if os.environ.get("BENCH_PEERS") else {}


def worker(chosen: Sequence[str]) -> None:
    asked = [(each, kind) for each in WORKLOADS if each.name[:2] in chosen for kind in KINDS if kind in chosen]
    for workload, kind in asked:
        folder = f"{os.environ['BENCH_DIR']}/{workload.name[:2]}-{kind}-{os.environ['WORLD_SIZE']}"
        is_first, row = measure(workload, kind, folder)
        if is_first:
            print(f"\nrow {json.dumps(row)}", flush=True)  # a peer's progress bar may be in this line
    sys.stdout.flush()
    os._exit(0)  # like the kit: torch's threads may abort during teardown


def columns() -> list[str]:
    others = ["by hand", "bare", *chosen_peers()]
    ratios = [f"kit / {other}" for other in others]
    return ["workload", "data", "processes", "kit, steps/s", *others, *ratios, "by hand / bare", "spread of bare"]


NOISY = 0.2
"""Where the bare loop's own turns differ by more than so much of their median, the machine had other things to do."""


def main() -> None:
    """Run the workloads with one and two processes; print and plot the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.loop")
    names = [workload.name[:2] for workload in WORKLOADS]
    parser.add_argument("workloads", nargs="*", default=names, choices=[*names, names], help="default: all")
    parser.add_argument("--data", nargs="+", default=["plain"], choices=KINDS, help="data sets (default: plain)")
    parser.add_argument("--peers", action="store_true", help="beside Accelerate and Lightning, too, where installed")
    given = parser.parse_args()
    if given.peers:
        os.environ["BENCH_PEERS"] = "1"
    print(f"| {' | '.join(columns())} |\n|{'---|' * len(columns())}", flush=True)
    rows = []
    for processes in (1, 2):
        for row in rows_of(processes, [*given.workloads, *given.data]):
            rows.append(row)
            print("|", " | ".join(map(str, row)), "|", flush=True)
    if noisy := [f"{row[0].split(':')[0]} {row[1]} with {row[2]}" for row in rows if row[-1] > NOISY]:
        print(f"\nA noisy machine: the bare loop's turns differ by more than {NOISY:.0%} in {', '.join(noisy)}.")
    draw(columns(), rows, RESULTS / "loop.png")


def rows_of(processes: int, chosen: Sequence[str], *, module: str = "bench.loop") -> Iterator[list[Any]]:
    """Yield the rows that the first rank of `module` prints, run by new ranks as `MODULE worker WORKLOADS`."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "BENCH_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        with subprocess.Popen(
            [*line, "-m", module, "worker", *chosen],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            for text in child.stdout or ():
                if text.startswith("row "):
                    yield json.loads(text[4:])
        if child.returncode:
            sys.exit(f"the run with {processes} processes failed with {child.returncode}")


def draw(titles: Sequence[str], rows: Sequence[Sequence[Any]], path: Path) -> None:
    """Plot the steps/s of the table relative to the bare loop."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    for offset, name in ((-0.2, "kit"), (0.2, "by hand")):
        at = titles.index(f"{name} / bare")
        bars = axes.bar([place + offset for place in places], [row[at] for row in rows], 0.38, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(
        list(places),
        [f"{row[0].split(',')[0]}\n{row[1]}, {row[2]} process{'es' * (row[2] > 1)}" for row in rows],
        fontsize=8,
    )
    axes.set_ylabel("steps/s beside the bare loop")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    worker(sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main()
