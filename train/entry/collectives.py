"""`python -m train.collectives`, in a clone: `muster collectives`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("muster.collectives", run_name="__main__", alter_sys=True)
