"""Callbacks for tests."""

import contextlib
import json
import time
from pathlib import Path

import torch

from muster.errors import StorageError
from muster.faults import lost_output
from muster.train.callbacks.base import Callback
from muster.train.callbacks.ema import UPDATES, Ema
from muster.world.dtensor import own_piece


class Pace(Callback):
    """Makes each step last `step_s` seconds longer, or as long as the test says (`Job.pace`)."""

    def __init__(self, step_s: float):
        self.step_s = step_s

    def on_step_end(self, run):
        with contextlib.suppress(FileNotFoundError):
            self.step_s = float(Path(run.config.output_dir).with_name("pace").read_text())
        time.sleep(self.step_s)


class Hold(Callback):
    """Has training stand after step `step` until there is a file `until`, the process is told to stop, or it is killed."""

    def __init__(self, step: int, until: str | None = None):
        self.step, self.until = step, until

    def on_step_end(self, run):
        preemption = run.running.peers.agreement._preemption
        while run.step >= self.step and not preemption.signalled and not (self.until and Path(self.until).exists()):
            time.sleep(0.05)


class Unheard(Callback):
    """Has training stand in step 1 until nobody reads its output."""

    def on_step_end(self, run):
        while lost_output.has_reader():
            time.sleep(0.05)


class NoWaits(Callback):
    """Has torch raise an error of whatever waits for the GPU from step 2 to step `last`."""

    def __init__(self, last: int):
        self.last = last

    def on_step_end(self, run):
        torch.cuda.set_sync_debug_mode("error" if 2 <= run.step < self.last else "default")


class Spoil(Callback):
    """Makes the last element of the last weight infinite after step `at`; nothing is logged or averaged of it."""

    def __init__(self, at: int):
        self.at = at

    def on_step_end(self, run):
        if run.step == self.at and (weights := run.strategy.optimizer_step.parameters):
            own_piece(weights[-1].detach()).view(-1)[-1:].fill_(torch.inf)


class StopAt(Callback):
    """Ends training at step `at`."""

    def __init__(self, at: int):
        self.at = at

    def on_step_end(self, run):
        if run.step == self.at:
            run.stop("enough")


class Groups(Callback):
    """Records each step's learning rate, and momentum or betas, of the optimizer's groups."""

    def on_start(self, run):
        self.lines = {}

    def on_step_end(self, run):
        groups = run.strategy.optimizer_step.optimizer.param_groups
        self.lines[run.step] = [[each["lr"], each.get("betas") or each["momentum"]] for each in groups]

    def on_end(self, run):
        Path(run.config.output_dir, f"groups-{run.world.rank}.json").write_text(json.dumps(self.lines))


class Uncounted(Ema):
    """Saves its averages as earlier versions did."""

    def state(self):
        return {name: value for name, value in super().state().items() if name != UPDATES}


class FreezeAt(Callback):
    """Freezes the parameters whose names begin with `prefix` from step `at` on."""

    def __init__(self, at: int, prefix: str):
        self.at, self.prefix = at, prefix

    def on_step_end(self, run):
        for name, parameter in run.strategy.parameters().items() if run.step == self.at else ():
            if name.startswith(self.prefix):
                parameter.requires_grad_(False)


class Full(Callback):
    """The storage has no space for the checkpoint of one step."""

    def __init__(self, step: int):
        self.step = step

    def on_start(self, run):
        storage = run.running.checkpoints.storage
        commit = storage.commit

        def commits(step, *rest):
            if step == self.step:
                raise StorageError(f"no space for step {step}")
            return commit(step, *rest)

        storage.commit = commits
