"""A loop whose body goes on after the step: `python bodies.py FOLDER`. SLOW_S: seconds that an evaluation takes at step 8.

With STOPS, the first evaluation of step 8 makes the file `evaluating`, and signals SIGTERM to its own rank; FAULTS kills one there
(evaluation@8:RANK). SAVE asks for a checkpoint before that; LEAVE leaves the loop after step LEAVE_AT (12).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault

RANK = int(os.environ.get("RANK", "0"))
SLOW_S = float(os.environ.get("SLOW_S", "0"))
INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


def disturb():
    if RANK == 1 and "STOPS" in os.environ and not Path("evaluating").exists():
        Path("evaluating").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    fault("evaluation", 8)


def main(job):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.05")))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    job.track(model=model, optimizer=optimizer, schedule=schedule)

    def error(batch):
        if job.steps_done == 8:
            disturb()
            time.sleep(SLOW_S / 4)
        return {"error": ((model.module(batch[0]) - batch[1]) ** 2)[:, 0]}

    for inputs, targets in job.batches(DATA, batch_size=8, epochs=5):
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        if not job.ends_epoch:
            continue
        if "SAVE" in os.environ:
            job.save()
        job.evaluate(DATA, error, batch_size=4)
        schedule.step()
        if "LEAVE" in os.environ and job.steps_done == int(os.environ.get("LEAVE_AT", "12")):
            break
    print("after the loop", job.steps_done, flush=True)


if __name__ == "__main__":
    save_every = int(os.environ.get("SAVE_EVERY", "6"))
    muster.Job(sys.argv[1], save_every=save_every, log_every=1, tensorboard=False, timeout_s=20).run(main)
