"""The kit beside a hand-written DDP loop on the same model and data: steps per second as a ratio.

`python -m bench.loop` starts itself under torchrun with one and with two processes. The two loops take turns in the
same processes, so that a busy machine slows both; the ratio of each pair of turns is taken, and the median of them.
Checkpoints, evaluation and TensorBoard are off on both sides; the kit logs every 50 steps, as by hand one would.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROUNDS = int(os.environ.get("ROUNDS", "5"))
WORKLOADS = {  # name: (model override, image shape, samples per rank and step, steps a turn)
    "mlp 784-512-10, batch 64": ("model=mlp", (1, 28, 28), 64, 300),
    "resnet18 32x32, batch 32": ("model=resnet18", (3, 32, 32), 32, 4),
}


class Pictures(Dataset):
    """Images in memory as uint8, the same for both loops; `__getitem__` as a hand-written dataset has it."""

    num_classes = 10

    def __init__(self, shape: list[int]):
        self.images = torch.randint(0, 256, (10_000, *shape), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (10_000,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index].float() / 255, self.labels[index]


class Gathered(Pictures):
    """The same, a micro-batch at a time: what the kit's own datasets do."""

    def __getitems__(self, indices: list[int], keys: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[indices].float() / 255, self.labels[indices]


def by_hand(model: nn.Module, dataset: Dataset, batch: int) -> Any:
    """The loop of PyTorch's DDP tutorial; a generator that does one step a turn."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = DistributedSampler(dataset, world_size, dist.get_rank() if world_size > 1 else 0)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(DataLoader(dataset, batch, sampler=sampler)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                loss.item()
            yield


def with_kit(model: str, shape: tuple[int, ...], batch: int, folder: str) -> Any:
    """The kit's own step, log and data path, one step a turn."""
    from train.config.compose import compose
    from train.config.parts import build
    from train.data.load import Data
    from train.dist.place import Place
    from train.dist.world import START_S, start
    from train.faults.exit import Exit
    from train.faults.heartbeat import Heartbeat
    from train.faults.preemption import Preemption
    from train.loop import begin, load, log
    from train.plan import Plan
    from train.run import open_run

    place = Place.from_env()
    overrides = [model, "data=synthetic", f"data.image_shape={list(shape)}", f"batch_size={batch * place.world_size}"]
    overrides += ["optimizer.lr=0.01", "max_steps=1000000", "log.every_steps=50", "log.progress=none"]
    overrides += ["log.tensorboard=false", f"output_dir={folder}", "dist.timeout_s=3600"]
    config = compose(overrides)
    world = start(config, place)
    heartbeat = Heartbeat(world, timeout_s=config.dist.timeout_s, start_s=START_S, on_hang=print)
    heartbeat.start()  # its cost is part of the step's
    strategy = build(config.strategy)
    with open_run(config, world, strategy, Preemption(), heartbeat, Exit(Path(folder))) as (opened, _, _):
        data = Data(Gathered(list(shape)), None, shape, 10, "bench")
        run = dataclasses.replace(opened, data=data, plan=Plan(len(data.train), config.batch_size))
        yield run
        for micro_batches in load(run, run.data.train, run.plan, range(10**6)):
            begin(run, "step")
            result = run.strategy.step(run.step, micro_batches)
            run.progress.step += 1
            run.metrics.advance(run.step)
            if run.step % config.log.every_steps == 0:
                log(run, result)
            yield


def speed(loop: Any, steps: int) -> float:
    """Steps per second over `steps` steps."""
    started = time.perf_counter()
    for _ in range(steps):
        next(loop)
    return steps / (time.perf_counter() - started)


def worker() -> None:
    """On every rank: take turns and print, on rank 0, one JSON line a workload."""
    from train.config.parts import build

    for name, (model, shape, batch, steps) in WORKLOADS.items():
        kit = with_kit(
            model, shape, batch, f"{os.environ['BENCH_DIR']}/{model.removeprefix('model=')}-{os.environ['WORLD_SIZE']}"
        )
        run = next(kit)
        plain = build(run.config.model, input_shape=shape, num_classes=Pictures.num_classes)
        hand = by_hand(plain, Pictures(list(shape)), batch)
        speed(kit, steps), speed(hand, steps)  # warm up
        pairs = [(speed(kit, steps), speed(hand, steps)) for _ in range(ROUNDS)]
        if run.world.is_first:
            medians = [round(statistics.median(column), 1) for column in zip(*pairs, strict=True)]
            ratio = round(statistics.median(ours / theirs for ours, theirs in pairs), 2)
            print(json.dumps([name, run.world.size, *medians, ratio]), flush=True)
        kit.close()
        run.heartbeat.close()
        run.world.close()
    sys.stdout.flush()
    os._exit(0)  # as the kit does: torch's threads may abort in a tear-down


def main() -> None:
    """Run all workloads with one and two processes and print a table."""
    print("| workload | processes | kit, steps/s | by hand, steps/s | ratio |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "BENCH_DIR": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        for processes in (1, 2):
            line = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                "-m",
                "bench.loop",
                "worker",
            ]
            with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
                for text in child.stdout or ():
                    print("|", " | ".join(map(str, json.loads(text))), "|", flush=True)
            if child.returncode:
                sys.exit(f"the run with {processes} processes failed with {child.returncode}")


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
