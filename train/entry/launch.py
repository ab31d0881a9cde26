"""`python -m train.launch`, in a clone: `muster launch`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("muster.launcher", run_name="__main__", alter_sys=True)
