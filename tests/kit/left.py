"""What a program leaves to the interpreter's end, in the folder LEFT: files that it never closes, atexit, a thread."""

import atexit
import gc
import os
import threading
import time
from pathlib import Path

from muster.train.callbacks.base import Callback


class Left:
    """Writes a line for each step."""

    def __init__(self):
        self.folder, self.rank, self.steps = Path(os.environ["LEFT"]), os.environ.get("RANK", "0"), 0
        self.file = self.path("lines").open("w")
        atexit.register(lambda: self.path("atexit").open("a").write(f"{self.steps}\n"))

    def path(self, kind):
        return self.folder / f"{kind}-{self.rank}"

    def step(self):
        self.steps += 1
        self.file.write(f"{self.steps}\n")

    def begin_thread(self):
        threading.Thread(target=self._write_late).start()

    def _write_late(self):
        time.sleep(0.5)
        self.path("thread").open("a").write("written\n")


class Leaves(Callback):
    """The same in the trainer."""

    def on_start(self, run):
        self.left = Left()
        gc.freeze()  # as scripts do to collect less
        self.left.begin_thread()

    def on_step_end(self, run):
        self.left.step()


def found(folder, rank, *, steps):
    """Assert that all of it is there, once."""
    lines = (folder / f"lines-{rank}").read_text().splitlines()
    assert lines == [str(step) for step in range(1, steps + 1)], (rank, lines)
    assert (folder / f"atexit-{rank}").read_text() == f"{steps}\n"
    assert (folder / f"thread-{rank}").read_text() == "written\n"
