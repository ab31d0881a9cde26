"""Parts of a user's own, named by import path from the tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from train.strategies.ddp import Ddp


class Stateful(nn.Sequential):
    """Dropout and batch norm: what a resume can get wrong."""

    def __init__(self, input_shape, num_classes):
        super().__init__(
            nn.Conv2d(input_shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, num_classes),
        )  # fmt: skip


class Watched(Ddp):
    """DDP that writes down a digest of its weights after every step."""

    def step(self, step, batches):
        result = super().step(step, batches)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()
        with Path(f"digests-{self.world.rank}").open("a") as file:
            file.write(json.dumps({"step": step, "digest": digest}) + "\n")
        return result


class Exploding(nn.Sequential):
    """Its gradient is not finite in the steps told, and fine in the others."""

    def __init__(self, input_shape, num_classes, bad_steps=(3,)):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))
        self.bad_steps, self.calls = set(bad_steps), 0

    def forward(self, x):
        if self.training:
            if self.calls in self.bad_steps:
                x = x * float("nan")
            self.calls += 1
        return super().forward(x)


class Crashing(nn.Linear):
    """Raises on one rank in one step."""

    def __init__(self, rank=1, at=2):
        super().__init__(64, 10)
        self.rank, self.at, self.calls = rank, at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK", "0") == str(self.rank):
            raise ValueError("the user's own mistake")
        return super().forward(x.flatten(1))


class Frozen(nn.Linear):
    """Nothing to train."""

    def __init__(self):
        super().__init__(64, 10)
        self.requires_grad_(False)


class MeanSquares:
    """A loss of one's own without metrics."""

    def __call__(self, outputs, targets):
        return ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).mean()


class Tokens:
    """Samples one by one, with a random transform that uses the global generator."""

    num_classes = 3

    def __init__(self, train, noise=0.1):
        self.noise = noise if train else 0.0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index % 3)) + self.noise * torch.randn(4), index % 3


class Numbered:
    """Points whose first coordinate is the sample's own number, so that a step can tell which samples it got."""

    num_classes = 2
    input_shape = (3,)

    def __init__(self, train, size=1000):
        generator = torch.Generator().manual_seed(int(train))
        self.points = torch.cat([torch.arange(size)[:, None].float(), torch.rand(size, 2, generator=generator)], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], (self.points[index, 1:].sum() > 1).long()


class Slow(nn.Linear):
    """A line through the points that takes its time."""

    def __init__(self, delay_s=0.05):
        super().__init__(2, 2)
        self.delay_s = delay_s

    def forward(self, x):
        if self.training:
            time.sleep(self.delay_s)
        return super().forward(x[:, 1:])


class Recorded(Ddp):
    """DDP that writes down which samples each step got, into the folder that LEDGER names."""

    def step(self, step, batches):
        samples = [int(number) for batch in batches for number in batch.inputs[: batch.count, 0]]
        line = {
            "step": step,
            "time": time.time(),
            "attempt": self.world.attempt,
            "rank": self.world.rank,
            "samples": samples,
        }
        with (Path(os.environ["LEDGER"]) / f"{self.world.attempt}-{self.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super().step(step, batches)


RECORDED = ("data._target_=custom.Numbered", "model._target_=custom.Slow", "strategy._target_=custom.Recorded")


def recorded(folder):
    """step -> the samples of the last attempt at it, in the order of ranks."""
    last = {}
    for path in Path(folder).glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            known = last.setdefault(line["step"], {})
            begun = known.get(line["attempt"], (line["time"], {}))
            begun[1][line["rank"]] = line["samples"]
            known[line["attempt"]] = (min(begun[0], line["time"]), begun[1])
    merged = {}
    for step, attempts in last.items():
        _, ranks = max(attempts.values(), key=lambda attempt: attempt[0])
        merged[step] = [sample for rank in sorted(ranks) for sample in ranks[rank]]
    return merged


def assert_exact(folder, *, steps, batch_size, size=1000, seed=0):
    """Every step got exactly the samples that the plan gives it; `steps` None: of a run that was ended somewhere."""
    from train.plan import Plan

    plan, got = Plan(size, batch_size, seed), recorded(folder)
    if steps is None:  # the last step may have been begun by some ranks only
        steps = max(got)
        got.pop(steps)
    assert sorted(got) == list(range(steps))
    for step in range(steps):
        assert got[step] == plan.batch(step).tolist(), step


class Stuck(Slow):
    """One rank stops moving in one step of its first attempt, with the GIL released or held."""

    def __init__(self, rank=1, at=30, delay_s=0.02):
        super().__init__(delay_s)
        self.rank, self.at, self.calls = rank, at, 0

    def forward(self, x):
        self.calls += self.training
        mark = Path(os.environ["LEDGER"]).parent / "stuck"
        if self.calls == self.at and os.environ.get("RANK", "0") == str(self.rank) and not mark.exists():
            mark.touch()
            time.sleep(10_000)
        return super().forward(x)


class SlowToStart(Slow):
    """SLOW_S seconds for the model, and again for the first step."""

    def __init__(self):
        time.sleep(float(os.environ["SLOW_S"]))
        super().__init__()
        self.begun = False

    def forward(self, x):
        if not self.begun:
            time.sleep(float(os.environ["SLOW_S"]))
            self.begun = True
        return super().forward(x)


class SlowToTest(Numbered):
    """Reading the test split takes a while."""

    def __init__(self, train):
        super().__init__(train, size=1000 if train else 40)
        self.train = train

    def __getitem__(self, index):
        if not self.train:
            time.sleep(0.05)
        return super().__getitem__(index)


class Hungry(Slow):
    """Runs into a memory limit in its third step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            import resource

            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
            torch.ones(2**28)
        return super().forward(x)


class FillsDisk(nn.Linear):
    """Fills the disk of its run before step 9 and frees it before step 14."""

    def __init__(self):
        super().__init__(64, 10)
        self.calls, self.file = 0, Path(sys.argv[1].removeprefix("output_dir=")).parent / "filler"

    def forward(self, x):
        self.calls += self.training
        if self.calls == 9 and os.environ["RANK"] == "0":
            with contextlib.suppress(OSError), self.file.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if self.calls == 14 and os.environ["RANK"] == "0":
            self.file.unlink()
        return super().forward(x.flatten(1))


class Spoiled(Numbered):
    """Some training samples cannot be read."""

    def __init__(self, train):
        super().__init__(train)
        self.train = train

    def __getitem__(self, index):
        if self.train and index in (3, 4, 500):
            raise OSError(f"image file {index} is truncated")
        return super().__getitem__(index)
