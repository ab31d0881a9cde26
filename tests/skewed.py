"""The kit's entry on a machine whose clock is a minute ahead."""

import os
import sys
import time

from train.preemption import Preemption

true_time = time.time
time.time = lambda: true_time() + 60

if __name__ == "__main__":
    preemption = Preemption()
    preemption.install()
    from train.entry import main

    code = main(preemption)
    sys.stdout.flush()
    os._exit(code)
