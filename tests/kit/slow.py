"""The kit's entry on slow storage: every rank's file of a checkpoint takes SLOW_S seconds, rank 1's record of its end SLOW_RECORD_S."""

import os
import time

from kit.front import run
from train.checkpoint.backends.folder import Folder
from train.faults import attempts

put, write = Folder.put, attempts.write


def slowly(self, name):
    if name.endswith(".bin"):
        time.sleep(float(os.environ.get("SLOW_S", 0)))
    return put(self, name)


def write_slowly(folder, attempt):
    if os.environ.get("RANK") == "1":
        time.sleep(float(os.environ.get("SLOW_RECORD_S", 0)))
    write(folder, attempt)


Folder.put, attempts.write = slowly, write_slowly

if __name__ == "__main__":
    run()
