"""The kit's entry as `python -m train` has it, for modules that change something before."""

import os
import sys

from train.faults.preemption import Preemption


def run():
    preemption = Preemption()
    preemption.install()
    from train.entry import main

    code = main(preemption)
    sys.stdout.flush()
    os._exit(code)
