"""A loop that saves amid a step, after the backward pass and before `optimizer.step()`: `python amid.py FOLDER`.

FORM: best: by an evaluation; exit: and leaves with 75 at step 10; late: after `optimizer.step()`; stop: it is told to stop there; own: it iterates by itself, and
saves after the step, once the average has followed; bare: it catches what
ends the batches when it is told to stop. WITH=1: in a `with` block. NORM=1: with batch norm; TEACHER=1: with an average that follows before the pass. EVERY: the steps of the
job in one of the optimizer, from step FROM. TAIL=1: that comes after `job.step()`. LEAVE: save and leave with 75 after this step. END_AT: SIGKILL in the body after this step.
"""

import copy
import os
import signal
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.until import until

FORM, NORM, EVERY = os.environ.get("FORM", ""), os.environ.get("NORM"), int(os.environ.get("EVERY", "1"))
TEACHER, TAIL = bool(os.environ.get("TEACHER")), "TAIL" in os.environ
END_AT, FROM = int(os.environ.get("END_AT", "0")), int(os.environ.get("FROM", "0"))
DATA = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.ones(64))


def batches(job):
    if FORM == "bare":
        return caught(job)
    return own(job) if FORM == "own" else job.batches(DATA, batch_size=8, epochs=3)


def own(job):
    while job.steps_done < 24:
        at = job.steps_done % 8 * 8
        yield DATA[at : at + 8]


def caught(job):
    """As some loops read: whatever ends the iterator is taken for the end of an epoch."""
    made = iter(job.batches(DATA, batch_size=8, epochs=3))
    while job.steps_done < 24:
        try:
            batch = next(made)
        except:  # noqa: E722
            batch = next(iter(job.batches(DATA, batch_size=8, epochs=3)))
        yield batch


def stops(job):
    os.kill(os.getpid(), signal.SIGTERM)
    return until(lambda: job.should_stop, "the signal", timeout_s=60)


def follow(teacher, net):
    for own, other in zip(teacher.parameters(), net.parameters(), strict=True):
        own.lerp_(other.detach(), 0.1)


def main(job):
    net = nn.Sequential(nn.BatchNorm1d(4) if NORM else nn.Dropout(0.5), nn.Linear(4, 1))
    model = DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher = copy.deepcopy(net).requires_grad_(False)
    job.track(model=model, optimizer=optimizer, **({"teacher": teacher} if TEACHER else {}))
    for x, y in batches(job):
        if TAIL and (job.steps_done <= FROM or job.steps_done % EVERY == 0):
            optimizer.zero_grad()
        if TEACHER and FORM != "own":
            follow(teacher, net)
        loss = (model(x)[:, 0] - y).pow(2).mean() + (TEACHER and (model(x) - teacher(x)).pow(2).mean())
        loss.backward()
        if FORM == "bare" and END_AT and job.steps_done == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        if job.steps_done in (5, 10, 20) and FORM not in ("own", "bare"):
            if FORM == "best":
                job.evaluate(DATA, lambda batch: {"loss": (net(batch[0])[:, 0] - batch[1]).pow(2)}, best="loss")
            elif FORM == "stop" and END_AT and job.steps_done == 10:
                if stops(job):
                    break
            else:
                job.save()
            if FORM == "exit" and END_AT and job.steps_done == 10:
                raise SystemExit(75)
        if END_AT and job.steps_done == END_AT:
            job._services.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        ends = job.steps_done < FROM or (job.steps_done + 1) % EVERY == 0
        if ends and not TAIL:
            optimizer.step()
            optimizer.zero_grad(set_to_none=EVERY != 3)
        if FORM == "late" and END_AT and job.steps_done == 10:
            raise SystemExit(75)
        job.step(loss=loss)
        if ends and TAIL:
            optimizer.step()
        if job.steps_done == int(os.environ.get("LEAVE", "0")):
            job.save()
            raise SystemExit(75)
        if FORM == "own":
            follow(teacher, net)
            if job.steps_done == 10:
                job.save()


if __name__ == "__main__":
    job = muster.Job(sys.argv[1], save_every=500, keep=2, tensorboard=False, timeout_s=20)
    if "WITH" in os.environ:
        with job:
            main(job)
    else:
        job.run(main)
