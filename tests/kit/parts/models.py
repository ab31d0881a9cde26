"""Models with a mind of their own."""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn


class Stateful(nn.Sequential):
    """Dropout and batch norm: what a resume can get wrong."""

    def __init__(self, input_shape, num_classes):
        super().__init__(
            nn.Conv2d(input_shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, num_classes),
        )  # fmt: skip


class Fickle(Stateful):
    """With a layer that only some samples make it use, and one that none does."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.seldom, self.never = nn.Linear(num_classes, num_classes), nn.Linear(2, 2)

    def forward(self, x):
        y = x
        for name, layer in self.named_children():
            y = layer(y) if name.isdigit() else y
        return y + self.seldom(y) if x[0, 0, 0, 3] > 0.2 else y


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
    """Raises on one rank in one step; `anew`: in other words each time."""

    def __init__(self, rank=1, at=2, anew=False):
        super().__init__(64, 10)
        self.rank, self.at, self.calls, self.anew = rank, at, 0, anew

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK", "0") == str(self.rank):
            raise ValueError(f"the user's own mistake{f' in process {os.getpid()}' if self.anew else ''}")
        return super().forward(x.flatten(1))


class AllCrash(nn.Linear):
    """Raises on all ranks in one step, on rank 0 half a second after the others."""

    def __init__(self):
        super().__init__(64, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            time.sleep(0.5 * (os.environ["RANK"] == "0"))
            raise ValueError("the user's own mistake")
        return super().forward(x.flatten(1))


class Frozen(nn.Linear):
    """Nothing to train."""

    def __init__(self):
        super().__init__(64, 10)
        self.requires_grad_(False)


class Slow(nn.Linear):
    """A line through the points that takes its time."""

    def __init__(self, delay_s=0.05):
        super().__init__(2, 2)
        self.delay_s = delay_s

    def forward(self, x):
        if self.training:
            time.sleep(self.delay_s)
        return super().forward(x[:, 1:])


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


class Normed(nn.Sequential):
    """Batch norm over vectors, which needs two samples."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))
