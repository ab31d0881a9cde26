"""`python -m train.doctor`, in a clone: `muster doctor`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("muster.train.doctor", run_name="__main__", alter_sys=True)
