"""A loop that keeps its best evaluation and stops early: `python chooses.py FOLDER`; FAULTS kills ranks (kit/faults.py).

FORM: own: the loop iterates by itself, and evaluates after the checkpoint of the step; other: a second evaluation chooses, too, and twice: of
another model; score: a name that says no direction; alone: it only evaluates; fewer: on fewer samples; rollouts: on others each time. STOP_AT: a step in whose body SIGTERM comes.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault
from kit.until import until

FORM = os.environ.get("FORM", "")
STOP_AT = int(os.environ.get("STOP_AT", "0"))
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(160, 8, generator=GENERATOR)
TARGETS = (INPUTS @ torch.randn(8, 4, generator=GENERATOR) + 3 * torch.randn(160, 4, generator=GENERATOR)).argmax(1)
DATA = torch.utils.data.TensorDataset(INPUTS[:96], TARGETS[:96])
TEST = torch.utils.data.TensorDataset(INPUTS[96:], TARGETS[96:])
FEWER = torch.utils.data.Subset(TEST, range(40))


def steps(job):
    if FORM != "own":
        yield from job.batches(DATA, batch_size=24, epochs=12)
        return
    while job.steps_done < 48:
        at = job.steps_done % 4 * 24
        yield DATA[at : at + 24]


def tested(step):
    """The samples of an evaluation."""
    if FORM == "rollouts":
        first = step // 4 % 8
        return torch.utils.data.Subset(TEST, range(first, first + 40))
    return FEWER if FORM == "fewer" else TEST


def is_best_saved(job):
    return job.best is None or Path(f"run/checkpoints/step-{job.best.step:08d}").exists()


def main(job):
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    job.track(model=model, optimizer=optimizer)

    def measure(batch):
        output = net(batch[0])
        loss = cross_entropy(output, batch[1], reduction="none")
        return {"loss": loss, "score": -loss, "accuracy": (output.argmax(1) == batch[1]).float()}

    chosen_by = {"score": "score"}.get(FORM, "loss")
    if FORM == "alone":
        job.evaluate(TEST, measure, best="loss")
        return
    for inputs, targets in steps(job):
        loss = cross_entropy(model(inputs), targets)
        (loss * job.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        fault(
            "stepped",
            job.steps_done,
            ready=lambda: until(lambda: is_best_saved(job), "the best checkpoint", timeout_s=60),
        )
        if job.steps_done == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        if job.steps_done % 4:
            continue
        job.evaluate(tested(job.steps_done), measure, best=chosen_by)
        if FORM == "twice":
            job.evaluate(TEST, lambda batch: {"loss": 2 * measure(batch)["loss"]}, best=chosen_by)
        if FORM == "other":
            job.evaluate(DATA, measure, best="accuracy")
        fault("evaluated", job.steps_done)
        if job.steps_done - job.best.step >= 16:
            break
    print(f"best: step {job.best.step} of {job.steps_done}", flush=True)


if __name__ == "__main__":
    save_every = int(os.environ.get("SAVE_EVERY", "10"))
    muster.Job(sys.argv[1], save_every=save_every, keep=1, log_every=4, tensorboard=False, timeout_s=20).run(main)
