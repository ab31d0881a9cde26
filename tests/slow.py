"""The kit's entry on slow storage: every file of a checkpoint takes SLOW_S seconds."""

import os
import time

from front import run

from train.checkpoint.backends import folder as storage

write_tensors = storage.write_tensors


def slowly(path, value):
    time.sleep(float(os.environ["SLOW_S"]))
    return write_tensors(path, value)


storage.write_tensors = slowly

if __name__ == "__main__":
    run()
