"""`python -m train.check [overrides]`: exit 0 if `python -m train` would accept them, else 2 with the same line.

Prints the folder of the run, in full, and nothing else: what a user's module prints goes to standard error.

A launcher asks once, before any node starts.
"""

import contextlib
import sys

from train.entry import main

if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        code = main(None)
    sys.exit(code)
