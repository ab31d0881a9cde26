"""`python -m train.check [overrides]`: exit 0 if `python -m train` would accept them, else 2 with the same line.

Prints the folder of the run, in full.

A launcher asks once, before any node starts.
"""

import sys

from train.entry import main

if __name__ == "__main__":
    sys.exit(main(None))
