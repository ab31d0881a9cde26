"""The kit's entry on slow storage.

Each rank's file of a checkpoint takes SLOW_S seconds, and rank 1's record of its end SLOW_RECORD_S. SLOW_FILES is the
share of reads and writes in a run's folder that take up to 0.4 s longer, before or after the operation.
"""

import functools
import io
import os
import random
import re
import time

from kit.front import run
from muster import outcome
from muster.checkpoint.backends.folder import Directory

put, write = Directory.put, outcome.write


def slowly(self, name):
    if name.endswith(".bin"):
        time.sleep(float(os.environ.get("SLOW_S", 0)))
    return put(self, name)


def write_slowly(folder, attempt):
    if os.environ.get("RANK") == "1":
        time.sleep(float(os.environ.get("SLOW_RECORD_S", 0)))
    write(folder, attempt)


def at_times(function, share):
    def patiently(path, *args, **kwargs):
        if not isinstance(path, (str, os.PathLike)) or not OF_A_RUN.search(os.fspath(path)):
            return function(path, *args, **kwargs)
        nap(share)
        try:
            return function(path, *args, **kwargs)
        finally:
            nap(share)

    return functools.wraps(function)(patiently)


def nap(share):
    if CHANCE.random() < share / 2:
        time.sleep(CHANCE.uniform(0, 0.4))


CHANCE = random.SystemRandom()  # Python's global generator is part of the run's state
Directory.put, outcome.write = slowly, write_slowly
OF_A_RUN = re.compile(r"outcome|refused|claim|alive|draft|step-|manifest|config\.yaml|metrics")
if share := float(os.environ.get("SLOW_FILES", 0)):
    for name in ("replace", "link", "rename", "unlink", "mkdir", "scandir", "listdir"):
        setattr(os, name, at_times(getattr(os, name), share))
    io.open = at_times(io.open, share)

if __name__ == "__main__":
    run()
