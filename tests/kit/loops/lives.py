"""A loop that `Job.run` calls: `python lives.py FOLDER`; FAULTS kills ranks where they are (kit/faults.py)."""

import contextlib
import os
import sys
import time
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault, saved

RANK = int(os.environ.get("RANK", "0"))
EVERY = int(os.environ.get("EVERY", "7"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
FORM = os.environ.get("FORM", "")
"""early: the schedule steps before the sum; global: the model is built before `run`; own: the loop iterates by itself;
inner: the module within DDP is tracked; counted: a buffer counts after the update; plain: there are no buffers;
constant: the only buffer never changes."""


def at(point, step):
    """Be killed here, if it is the place."""
    fault(point, step, ready=saved(step, 10))


class Numbered(torch.utils.data.Dataset):
    """Sample i is (x, y); x has noise from the global generators."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.rand(8), int(x.sum() > 0)


class Net(nn.Module):
    def __init__(self, job):
        super().__init__()
        norm = nn.LayerNorm(16) if FORM in ("plain", "constant") else nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        if FORM == "constant":
            self.register_buffer("scale", torch.full((), 0.5))
        elif FORM != "plain":
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.job = job
        self.net[0].weight.register_hook(lambda _: self.at("within-backward"))

    def at(self, point):
        if self.training:
            at(point, self.job.steps_done)

    def forward(self, x):
        self.at("forward")
        if FORM not in ("plain", "constant"):
            self.seen = self.seen + len(x)  # assigned, not changed in place
        found = self.net(x)
        self.at("after-forward")
        return found


def right(model):
    def measure(batch):
        at("within-evaluation", STEP[0])
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double()}

    return measure


def average(model):
    """Average the parameters over the ranks, as a loop with local steps does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def by_itself(job, data):
    while job.steps_done < 30:
        first = job.steps_done * 10 + RANK * 5
        yield torch.utils.data.default_collate([data[(first + each) % len(data)] for each in range(5)])


STEP = [0]
BEFORE = []


def main(job):
    at("build", 0)
    data = Numbered()
    net = BEFORE[0] if BEFORE else Net(job)
    net.job = job
    model = DistributedDataParallel(net)
    averages_at, begins = int(os.environ.get("ALONE", "0")), int(os.environ.get("BEGINS", "0"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if averages_at:  # a state of each rank's own would be refused at the first save
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    at("before-track", 0)
    job.track(model=net if FORM == "inner" else model, optimizer=optimizer, schedule=schedule)
    at("after-track", 0)

    def share(inputs, targets):  # closes over the model: a frame that an error has left holds its function
        loss = cross_entropy(model(inputs), targets)
        at("before-backward", job.steps_done)
        loss.backward()
        return loss

    for inputs, targets in by_itself(job, data) if FORM == "own" else job.batches(data, batch_size=10, epochs=5):
        STEP[0] = job.steps_done
        at("begin", job.steps_done)
        if averages_at:
            job.sum(0.0)
        if FORM == "early":
            schedule.step()
        if FORM != "global":
            optimizer.zero_grad()
        with model.no_sync() if averages_at and job.steps_done >= begins else contextlib.nullcontext():
            loss = share(inputs, targets)
        at("after-backward", job.steps_done)
        optimizer.step()
        if FORM == "counted":
            net.updates += 1
        if FORM == "global":
            optimizer.zero_grad()
        if FORM != "early":
            schedule.step()
        if averages_at and job.steps_done % averages_at == 1:
            average(model)
        at("after-update", job.steps_done)
        time.sleep(PAUSE_S if job.steps_done == 15 else 0.0)
        job.step(loss=loss, noise=torch.rand(()))
        job.log(last=job.steps_done)
        at("after-step", job.steps_done)
        if job.ends_epoch:
            at("before-evaluation", job.steps_done)
            job.evaluate(data, right(model), batch_size=30)
            at("after-evaluation", job.steps_done)
    at("after-loop", job.steps_done)
    job.evaluate(data, right(model), batch_size=30)
    at("end", job.steps_done)
    if job.metrics_port and job.is_first:
        with urlopen(f"http://127.0.0.1:{job.metrics_port}/metrics") as page:
            print(page.read().decode())


if __name__ == "__main__":
    if FORM == "global":
        torch.manual_seed(1)
        BEFORE.append(Net(None))
    survive, port = "SURVIVE" not in os.environ, int(os.environ.get("PORT", "0")) or None
    muster.Job(sys.argv[1], save_every=10, log_every=EVERY, timeout_s=20, survive=survive, metrics_port=port).run(main)
