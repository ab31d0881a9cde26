"""A model, an optimizer and a callback with points at which a rank can die (see kit/faults.py)."""

import ctypes
import math
import os
import random
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from kit.faults import fault, is_planned, made
from kit.until import until
from muster import outcome
from muster.checkpoint.backends.folder import Directory
from muster.train.callbacks.base import Callback
from muster.train.data.digits import Digits

DONE = [0]  # steps done by this process


def die(point):
    fault(point, DONE[0])


class Kill(Callback):
    def on_build(self, strategy):
        die("build")

    def on_start(self, run):
        DONE[0] = run.step
        die("start")

    def on_step_end(self, run):
        DONE[0] = run.step
        if folder := os.environ.get("STEPS_IN"):
            with Path(folder, f"rank-{os.environ['RANK']}").open("a") as file:
                file.write(f"{run.step}\n")
        run.log(seen=run.step)
        if run.step % 10 == 0:
            run.log(tens=run.step)
        die("step_end")

    def on_eval_begin(self, run):
        die("eval_begin")

    def on_eval_end(self, run, values):
        run.log(evaluated=run.step)
        die("eval_end")

    def on_checkpoint(self, run):
        die("save")

    def on_end(self, run):
        die("end")


class Backward(torch.autograd.Function):
    """Passes its input on, and dies in the middle of the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        die("backward")
        return gradient


class Net(nn.Module):
    """Has statistics and random numbers, which each rank has for itself."""

    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.first, self.norm = nn.Linear(math.prod(input_shape), 64), nn.BatchNorm1d(64)
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(64, num_classes)

    def forward(self, x):
        die("forward" if self.training else "evaluation")
        x = self.first(x.flatten(1))
        x = Backward.apply(x) if self.training else x
        return self.last(self.dropout(torch.relu(self.norm(x))))


class Plain(Net):
    """Has no statistics, of which each rank has its own."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.norm = nn.Identity()


class Untold(Plain):
    """Rank 0 dies in the middle of a message to rank 1, of which gloo tells neither the code that waits nor its own threads.

    waits: whether rank 1's main thread waits for the message; else it goes on to the step's sum, and only a thread of gloo waits.
    """

    BYTES, SENT = 256 << 20, 8 << 20

    def __init__(self, input_shape, num_classes, waits: bool):
        super().__init__(input_shape, num_classes)
        self.waits = waits

    def forward(self, x):
        mark = made() / "untold"
        if self.training and DONE[0] == 13 and dist.get_rank() < 2 and is_planned("message", 13):
            message = torch.zeros(self.BYTES, dtype=torch.uint8)
            if dist.get_rank() == 1:
                mark.touch()
                dist.broadcast(message, 0, async_op=not self.waits)
            else:
                until(mark.exists, "rank 1", timeout_s=30)
                before = written()
                dist.broadcast(message, 0, async_op=True)
                until(lambda: written() > before + self.SENT, "part of the message", timeout_s=30, every_s=0.0)
                die("message")
        return super().forward(x)


def written():
    """The bytes that this process has written, to sockets, too (proc_pid_io(5))."""
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])


class Busy(Net):
    """Rank 0 dies while rank 1 computes a long backward pass, which adds nothing."""

    FORWARD_S = 3.5  # the backward pass takes twice as long

    def forward(self, x):
        mark = made() / "busy"
        if self.training and DONE[0] == 13 and dist.get_rank() == 0 and is_planned("busy", 13):
            until(mark.exists, "rank 1", timeout_s=30)
            die("busy")
        if self.training and DONE[0] == 13 and dist.get_rank() == 1 and is_planned("busy", 13):
            mark.touch()
            began, more = time.monotonic(), torch.eye(800, requires_grad=True)
            while time.monotonic() < began + self.FORWARD_S:
                more = more @ more
            return super().forward(x) + 0 * more.sum()
        return super().forward(x)


class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        die("before_update")
        super().step(closure)
        die("after_update")


class Slowing(Sgd):
    """Slows its momentum down, and then asks the other ranks for something, before it updates the parameters."""

    def step(self, closure=None):
        for each in self.state.values():
            each["momentum_buffer"].mul_(0.9)
        die("within_step")
        dist.all_reduce(torch.zeros(()))
        super().step(closure)


class Hang(Callback):
    """Makes rank 1 sleep for ever after a step, in its first life; or its GPU, `on_device`, and the code goes on."""

    def __init__(self, at: int, *, on_device: bool = False):
        self.at, self.on_device = at, on_device

    def on_step_end(self, run):
        mark = made() / "hang"
        if run.step == self.at and run.world.rank == 1 and not mark.exists():
            mark.touch()
            torch.cuda._sleep(10**15) if self.on_device else signal.pause()


class Drawn(Net):
    """Its sums depend on numbers that it draws when it is built, and on Python's generator in each step."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.scale = 1 + random.random() + torch.rand(64)

    def forward(self, x):
        return super().forward(x * (1 + 0.01 * random.random() if self.training else 1))


class Taught(Plain):
    """A teacher, which is not trained, follows the last layer in each forward pass; torch does not count a change by `.data`."""

    def __init__(self, input_shape, num_classes, by_data: bool = False):
        super().__init__(input_shape, num_classes)
        self.by_data = by_data
        self.teacher = nn.Parameter(torch.zeros_like(self.last.weight), requires_grad=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                teacher = self.teacher.data if self.by_data else self.teacher
                teacher.mul_(0.9).add_(self.last.weight, alpha=0.1)
        return super().forward(x) + nn.functional.linear(self.first(x.flatten(1)), self.teacher)


class Late(Plain):
    """Draws from Python's generator from step 28 on."""

    def forward(self, x):
        return super().forward(x * (1 + 0.5 * random.random() if self.training and DONE[0] >= 28 else 1))


class Remembering(nn.Module):
    """A loss that depends on the mean of those before it, which each rank has for itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        if self.training:
            self.mean.lerp_(loss.detach(), 0.1)
        return loss * (1 + self.mean)


class Raises(Callback):
    """Raises on rank 1 after each step from the fifth on, of which the other ranks know nothing."""

    def on_step_end(self, run):
        if run.step >= 5 and run.world.rank == 1:
            raise ValueError("the user's own mistake")


class RaisesSlowly(Callback):
    """Raises on rank 1 after step 5, once, and takes 8 s to record it, as on storage that is slow."""

    def on_step_end(self, run):
        if run.step == 5 and run.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            write = outcome.write

            def slowly(*args, **kwargs):
                time.sleep(8)
                return write(*args, **kwargs)

            outcome.write = slowly
            raise ValueError("the user's own mistake")


class SlowStorage(Directory):
    """A folder in which the commit of step 20 takes half a minute."""

    def __init__(self, url):
        super().__init__(Path(url.partition("://")[2]))

    def publish(self, draft, name, manifest):
        mark = made() / "slow"
        if name.endswith("20") and not mark.exists():
            mark.touch()
            time.sleep(30)
        super().publish(draft, name, manifest)


class Subset(Digits):
    """Draws the labels that it changes when it is built."""

    def __init__(self, train):
        super().__init__(train, augment=False)
        for _ in range(20):
            self.labels[random.randrange(len(self))] = int(torch.randint(10, ()))


class Changing(Callback):
    """Changes the optimizer and what is trained, and counts the saves."""

    def __init__(self):
        self.saves = 0

    def on_step_end(self, run):
        if run.step == 10:
            run.strategy.optimizer_step.optimizer.param_groups[0]["momentum"] = 0.5

    def on_checkpoint(self, run):
        self.saves += 1

    def on_end(self, run):
        Path(run.config.output_dir, "saves").write_text(str(self.saves))

    def state(self):
        return {"saves": self.saves}

    def load(self, state):
        self.saves = state["saves"]


class Meeting(Callback):
    """All ranks meet after an evaluation, of which the callbacks before it have taken notice."""

    def on_eval_end(self, run, values):
        die("meeting")
        run.world.barrier()


class Behind(nn.BatchNorm1d):
    """Counts backward passes in a buffer, on which its outputs depend."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training:
            x.register_hook(self.count)
        return super().forward(x) * (1 + 0.01 * self.passes)

    def count(self, _):
        self.passes += 1


class Backwards(Net):
    """Changes a buffer in the backward pass, after a rank has noted its buffers."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.norm = Behind(64)


class SlowAgain(Digits):
    """Takes long to load once a rank has died."""

    def __init__(self, train: bool):
        super().__init__(train, augment=False)
        if train and any(made().iterdir()):
            time.sleep(2.5)


class FirstFails(Callback):
    """At a step, rank 0 raises an error or dies by SIGKILL while rank 1 waits in C, as for a device: no handler runs there.

    locks: otherwise rank 1 goes on, and on a GPU waits in NCCL.
    """

    def __init__(self, at: int, *, kills: bool = False, locks: bool = True):
        self.at, self.kills, self.locks = at, kills, locks

    def on_step_end(self, run):
        if run.step != self.at or (run.world.rank == 1 and not self.locks):
            return
        if run.world.rank == 1:
            lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t
            ctypes.CDLL(None).pthread_mutex_lock(lock)
            ctypes.CDLL(None).pthread_mutex_lock(lock)  # locked already: waits for ever, whatever signal comes
        time.sleep(0.5)
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("rank 0 has a bug")
