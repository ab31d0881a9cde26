"""Run a script with a job in it and disturb its steps: `python -m disturbed SCRIPT ARGUMENTS...`; see ddp.py."""

import runpy
import sys

from ddp import disturb

import muster

step = muster.Job.step


def disturbed(job, *args, **values):
    disturb(job.steps_done)
    step(job, *args, **values)


if __name__ == "__main__":
    muster.Job.step = disturbed
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
