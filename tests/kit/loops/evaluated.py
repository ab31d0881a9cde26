"""Each rank has batch-norm statistics of its own, and evaluates by rank 0's in the loop's body: `python evaluated.py FOLDER`.

It is copied and written as a whole there, and each rank logs a number of its own. The network outlives the job. A bar shows how the data are loaded, before: tqdm starts a thread for it. BLOCK=1: a `with` block in place of `Job.run`.
THREAD: a rank that has started a thread before.
"""

import copy
import gc
import io
import os
import sys
import threading

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

import muster
from kit.faults import fault, saved


class Bar(tqdm):
    """A bar of one's own, as some libraries have it."""


GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.stack([torch.randn(4, generator=GENERATOR) for _ in Bar(range(64))])
NETS = []


def main(job):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    NETS.append(net)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.track(model=model, optimizer=optimizer)
    for x in job.batches(INPUTS, batch_size=8, epochs=1):
        job.evaluate(INPUTS, lambda x: {"begun": net(x)[:, 0]}, batch_size=16)
        try:
            loss = model(x).pow(2).mean()
            fault("before-sum", job.steps_done)
            loss.backward()
        except RuntimeError:  # as in a loop that skips a batch for which the memory is too small
            continue
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        job.evaluate(INPUTS, lambda x: {"mean": net(x)[:, 0]}, batch_size=16)
        torch.save(copy.deepcopy(net), io.BytesIO())
        if job.steps_done == 2:
            job.log(own=job.rank)
        job.log(last=job.steps_done)
        fault("evaluated", job.steps_done, ready=saved(job.steps_done, 2))
    print(f"statistics of rank {job.rank}: {net[0].running_mean.tolist()}", flush=True)


if __name__ == "__main__":
    if os.environ.get("THREAD") == os.environ["RANK"]:
        threading.Thread(target=threading.Event().wait, name="own", daemon=True).start()
    made = muster.Job(sys.argv[1], save_every=2, log_every=100, tensorboard=False, timeout_s=20)
    if os.environ.get("BLOCK"):
        with made as job:
            main(job)
    else:
        made.run(main)
    gc.collect()
    NETS[-1](INPUTS)
