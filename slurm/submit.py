"""Submit this project's job to Slurm through submitit: `python slurm/submit.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone's own package

import muster

if __name__ == "__main__":
    sys.exit(muster.submit(sys.argv[1:], name="muster", words=[], cluster=[]))
