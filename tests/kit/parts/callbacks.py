"""Callbacks that only tests need."""

import time

from train.callbacks.base import Callback


class Pace(Callback):
    """A step lasts `step_s` seconds longer."""

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
