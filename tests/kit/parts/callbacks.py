"""Callbacks for tests."""

import json
import time
from pathlib import Path

from muster.train.callbacks.base import Callback
from muster.train.callbacks.ema import UPDATES, Ema


class Pace(Callback):
    """Makes each step last `step_s` seconds longer."""

    def __init__(self, step_s: float):
        self.step_s = step_s

    def on_step_end(self, run):
        time.sleep(self.step_s)


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
