"""Models with special behaviour."""

import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from kit.until import await_writer


class Stateful(nn.Sequential):
    """Dropout and batch norm, whose state a resume must restore."""

    def __init__(self, input_shape, num_classes):
        super().__init__(
            nn.Conv2d(input_shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, num_classes),
        )  # fmt: skip


class Fickle(Stateful):
    """Has a layer that only some samples use, and an unused one."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.seldom, self.never = nn.Linear(num_classes, num_classes), nn.Linear(2, 2)

    def forward(self, x):
        y = x
        for name, layer in self.named_children():
            y = layer(y) if name.isdigit() else y
        return y + self.seldom(y) if x[0, 0, 0, 3] > 0.2 else y


class Exploding(nn.Sequential):
    """Its gradient is not finite in the given steps."""

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
    """Raises on one rank in one step. anew: with a different message each time."""

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
    """A model without trainable parameters."""

    def __init__(self):
        super().__init__(64, 10)
        self.requires_grad_(False)


class Slow(nn.Linear):
    """A slow linear model."""

    def __init__(self, delay_s=0.05):
        super().__init__(2, 2)
        self.delay_s = delay_s

    def forward(self, x):
        if self.training:
            time.sleep(self.delay_s)
        return super().forward(x[:, 1:])


class Paced(Slow):
    """Is as slow as the test says (`Job.pace`), and at first 0.1 s a step."""

    def __init__(self, delay_s=0.1):
        super().__init__(delay_s)

    def forward(self, x):
        with contextlib.suppress(FileNotFoundError):
            self.delay_s = float((Path(os.environ["LEDGER"]).parent / "pace").read_text())
        return super().forward(x)


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
    """Takes SLOW_S seconds to build, and again in the first step."""

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
    """Exceeds a memory limit in its third step."""

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
            await_writer()  # of step 10: it finds no room, however late it comes
            self.file.unlink()
        return super().forward(x.flatten(1))


class Normed(nn.Sequential):
    """Batch norm over vectors, which needs at least two samples."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))


class Routed(nn.Module):
    """Four experts, one per sample. Ranks use different ones, and in some steps an expert is unused.

    layout: `modules`: experts are layers; `parameters`: rows of the block's own, as scales.
    """

    def __init__(self, num_classes, width=16, layout="modules"):
        super().__init__()
        self.stem, self.mid = nn.Linear(64, width), nn.Linear(width, width)
        self.block = Experts(width, layout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.block(self.mid(self.stem(x.flatten(1)).relu())))


class Experts(nn.Module):
    def __init__(self, width, layout="modules"):
        super().__init__()
        if layout == "modules":
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        else:
            self.experts = nn.ParameterList(nn.Parameter(torch.full((width,), 1 + n / 4)) for n in range(4))

    def forward(self, x):
        route, out = (x.detach().sum(1) * 1000).floor().long() % 4, torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (route == number).nonzero()[:, 0]
            if len(mine):
                part = expert(x[mine]) if isinstance(expert, nn.Module) else x[mine] * expert
                out = out.index_add(0, mine, part.tanh())
        return x + out


class RoutedStages(nn.Sequential):
    """The same for a pipeline."""

    def __init__(self, num_classes, width=16):
        super().__init__(
            nn.Flatten(), nn.Linear(64, width), Experts(width), nn.Linear(width, width), Experts(width), nn.Linear(width, num_classes)
        )  # fmt: skip


class Depth(nn.Module):
    """Stochastic depth: a block is skipped in some steps, on one rank or on all."""

    def __init__(self, num_classes, alone=True, width=16):
        super().__init__()
        self.stem, self.head, self.calls, self.alone = nn.Linear(64, width), nn.Linear(width, num_classes), 0, alone
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        x = self.stem(x.flatten(1))
        self.calls += self.training
        for number, block in enumerate(self.blocks):
            left_out = self.calls % 3 == number and not (self.alone and os.environ["RANK"] == "0")
            x = x if left_out and self.training else x + block(x).tanh()
        return self.head(x)


class Chancy(nn.Module):
    """Draws its initial parameters, one of them not trained, and buffers from unseeded generators."""

    def __init__(self, num_classes, width=16):
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, num_classes)
        own = torch.Generator()
        own.seed()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=own))
        drawn = torch.from_numpy(np.random.default_rng().standard_normal(width)).float()
        self.fixed = nn.Parameter(drawn, requires_grad=False)
        self.register_buffer("kept", torch.tensor([*os.urandom(width)]) / 255)
        self.register_buffer("lost", torch.tensor([*os.urandom(width)]) / 255, persistent=False)
        named = [*self.named_parameters(), *self.named_buffers()]
        Chancy.drawn = {name: value.tolist() for name, value in named}

    def forward(self, x):
        return self.head(self.mid((self.stem(x.flatten(1)) + self.fixed).relu() * self.kept + self.lost))


class ChancyStages(Chancy):
    """The same for a pipeline, which splits a sequence of layers."""

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.mid(self.stem(x).relu() * self.kept + self.lost + self.fixed))


class Odd(nn.Module):
    """Tensors that torch cannot split, whose size it does not know, or that no checkpoint holds."""

    def __init__(self, num_classes, kind):
        super().__init__()
        self.head = nn.LazyLinear(num_classes) if kind == "lazy" else nn.Linear(64, num_classes)
        self.scale = nn.Parameter(
            torch.ones(() if kind == "scalar" else 1, dtype=torch.float64 if kind == "mixed" else None)
        )

        if kind == "sparse":
            self.register_buffer("graph", torch.eye(64).to_sparse(), persistent=False)

    def forward(self, x):
        return self.head(x.flatten(1)) * self.scale.float()


class Sparse(nn.Module):
    """An embedding table with sparse gradients."""

    def __init__(self, num_classes: int, sparse: bool = True):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(300, 16, mode="sum", sparse=sparse), nn.Linear(16, num_classes)

    def forward(self, x):
        words = (x.flatten(1) * 5).long().clamp(0, 19) + 20 * (torch.arange(64) % 15)
        return self.head(torch.tanh(self.table(words)))


class Complex(nn.Module):
    """A complex layer."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(64, 16, dtype=torch.cfloat) * 0.1)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.head((x.flatten(1).to(torch.cfloat) @ self.waves).abs())


class LateGradient(nn.Module):
    """A layer that gets its first gradient in a later step."""

    def __init__(self, num_classes: int, after: int = 4):
        super().__init__()
        self.head, self.late = nn.Linear(64, num_classes), nn.Linear(num_classes, num_classes)
        self.after = after
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += self.training
        y = self.head(x.flatten(1))
        return y + self.late(y) if self.calls > self.after else y


class ReadsItself(nn.Linear):
    """Looks at its own weights, which a model without storage has not."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__(int(np.prod(input_shape)), num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1) * float(self.weight.sum() > 0))


class Backbone(nn.Sequential):
    """Digits' classifier on a backbone with batch norm and dropout."""

    def __init__(self, drop: float = 0.5):
        layers = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(drop)
        super().__init__()
        self.flatten, self.backbone = nn.Flatten(), nn.Sequential(*layers)
        self.neck, self.head = nn.Linear(16, 16), nn.Linear(16, 10)


class Teacher(nn.Linear):
    """Follows its own weights with a momentum, in each forward pass: by a parameter that is not trained, or a buffer.

    It begins as a copy, so that the first step changes nothing in it.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, how: str = "in-place"):
        super().__init__(int(np.prod(input_shape)), num_classes)
        self.how, copied = how, self.weight.detach().clone()
        if how == "buffer":
            self.register_buffer("teacher", copied)
        else:
            self.teacher = nn.Parameter(copied, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.training and self.how == "data":
                self.teacher.data.mul_(0.5).add_(self.weight, alpha=0.5)
            elif self.training:
                self.teacher.mul_(0.5).add_(self.weight, alpha=0.5)
        x = x.flatten(1)
        return super().forward(x) + nn.functional.linear(x, self.teacher)
