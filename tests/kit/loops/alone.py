"""A loop whose rank 0 calls a collective after every fourth step, which rank 1 does not: `python alone.py FOLDER`.

AT: the step instead, of four, as 1. BARRIER: the collective is torch's own, and not the job's. SAVE: a checkpoint is due every SAVE steps.
LEAVES: rank 1 leaves its loop there before the backward pass. LOOKS: all make the same calls, and rank 0 then looks at the model's gradients
for so many seconds, alone.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muster

DATA = torch.utils.data.TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))

LARGE = nn.Sequential(*[nn.Linear(400, 400) for _ in range(30)])


def main(job):
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    for (x,) in job.batches(DATA, batch_size=4, epochs=1):
        loss = model(x).square().mean()
        if "LEAVES" in os.environ and job.steps_done == 4 and job.rank == 1:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step()
        if (
            not {"LEAVES", "LOOKS"} & {*os.environ}
            and job.steps_done % 4 == int(os.environ.get("AT", "0"))
            and job.is_first
        ):
            dist.barrier() if os.environ.get("BARRIER") else job.sum(1.0)
    until = time.monotonic() + float(os.environ.get("LOOKS", "0"))
    while job.is_first and time.monotonic() < until:
        LARGE(torch.randn(256, 400, requires_grad=True)).sum().backward()


muster.Job(sys.argv[1], save_every=int(os.environ.get("SAVE", "100")), tensorboard=False, timeout_s=3).run(main)
