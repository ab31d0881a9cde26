"""`python -m train`, and `muster`: the entry of every rank on every substrate."""

from __future__ import annotations

import gc
import os
import sys

from train.faults.preemption import Preemption


def main() -> None:
    """Carry out the run that sys.argv describes and end this process with the contract's exit code."""
    preemption = Preemption()
    preemption.install()  # before the slow imports: a signal during start-up ends like any other
    gc.disable()  # until training begins: a sixth of the time of importing torch goes into collections
    from train.entry import main as enter

    code = enter(preemption)
    sys.stdout.flush()
    sys.stderr.flush()
    # No tear-down: it would put SIGTERM's default back, so that the launcher's signal hides the code, and torch's C++
    # threads may abort the process in it ("terminate called without an active exception").
    os._exit(code)


if __name__ == "__main__":
    main()
