"""`python -m train.evaluate`, in a clone: `muster evaluate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("muster.train.evaluate", run_name="__main__", alter_sys=True)
