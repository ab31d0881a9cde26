"""The kit's entry on slow storage: every file of a checkpoint takes SLOW_S seconds."""

import os
import sys
import time

from train import checkpoint
from train.preemption import Preemption

write_tensors = checkpoint.write_tensors


def slowly(path, value):
    time.sleep(float(os.environ["SLOW_S"]))
    return write_tensors(path, value)


checkpoint.write_tensors = slowly

if __name__ == "__main__":
    preemption = Preemption()
    preemption.install()
    from train.entry import main

    code = main(preemption)
    sys.stdout.flush()
    os._exit(code)
