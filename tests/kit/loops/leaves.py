"""A script that leaves much to its end: `python leaves.py FOLDER`; with FAILS rank 1 raises an error at step 6.

With FREEZES it has taken what it had opened out of the collections of garbage.
"""

import gc
import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault
from kit.left import Left

LEFT = Left()
if "FREEZES" in os.environ:
    gc.freeze()
DATA = torch.utils.data.TensorDataset(torch.arange(32.0)[:, None] / 32)


def main(job, lr):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    job.track(model=model, optimizer=optimizer)
    for (inputs,) in job.batches(DATA, batch_size=8, epochs=3, num_workers=1):
        fault("begin", job.steps_done)
        model(inputs).mean().backward()
        if "FAILS" in os.environ and job.steps_done == 6 and job.rank == 1:
            raise ValueError("of the script")
        optimizer.step()
        optimizer.zero_grad()
        job.step()
        LEFT.step()
    LEFT.begin_thread()


muster.Job(sys.argv[1], save_every=100, tensorboard=False, timeout_s=20).run(main, 0.05)
sys.stdout.write(f"after {LEFT.steps} steps {gc.get_freeze_count()}\n")  # in one write: both ranks have one output
