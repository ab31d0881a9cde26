"""`python -m train.report`, in a clone: `muster report`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("muster.report", run_name="__main__", alter_sys=True)
