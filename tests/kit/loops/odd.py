"""Loops with a state that is easily forgotten when a rank is restarted in place: `python odd.py FOLDER`, FORM, and FAULTS as for lives.py."""

import os
import sys

import torch
import torch.distributed as dist
from lives import Numbered, at
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import muster

FORM = os.environ["FORM"]


class Net(nn.Module):
    """zeroed: a layer takes part in even steps only. extra: the forward pass counts, in an extra state; unsaved: in a buffer that
    the first one makes, and that is in no state dict; taught: a layer that is not trained follows by .data; leaves: its forward pass broadcasts statistics."""

    def __init__(self, job):
        super().__init__()
        self.net, self.now_and_then, self.job = nn.Linear(8, 2), nn.Linear(8, 2), job
        self.norm = nn.BatchNorm1d(8) if FORM.startswith("leaves") else nn.Identity()
        self.scale = 1.0
        if FORM == "unsaved":
            del self.scale
            self.register_buffer("scale", None, persistent=False)
        self.now_and_then.requires_grad_(FORM != "taught")
        self.net.weight.register_hook(lambda _: at("within-backward", job.steps_done))

    def forward(self, x):
        at("forward", self.job.steps_done)
        if FORM == "unsaved":
            self.scale = torch.ones(()) if self.scale is None else self.scale * (1 - 0.1 * x.mean().tanh())
        self.scale *= 0.9 if FORM == "extra" else 1.0
        if FORM == "taught" and self.training:
            for own, other in zip(self.now_and_then.parameters(), self.net.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
        found = self.net(self.norm(x)) * self.scale
        return found if FORM == "zeroed" and self.job.steps_done % 2 else found + self.now_and_then(x)


class WithExtra(Net):
    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, scale):
        self.scale = scale


class ByHand(torch.optim.Optimizer):
    """SGD that sums each gradient itself and updates by .data; with momenta, each rank has those of its own parameters."""

    def __init__(self, parameters, *, job, momenta=False):
        super().__init__(parameters, {"lr": 0.1})
        self.job, self.momenta = job, momenta

    def step(self, closure=None):
        for number, each in enumerate(self.param_groups[0]["params"]):
            if self.momenta:
                if number % self.job.world_size == self.job.rank:
                    state = self.state[each]
                    state["momentum"] = state.get("momentum", torch.zeros_like(each)) * 0.9 + each.grad
                    each.data.add_(state["momentum"], alpha=-0.1)
                dist.broadcast(each.data, number % self.job.world_size)
                continue
            dist.all_reduce(each.grad)
            each.data.add_(each.grad, alpha=-0.05)
            at(f"within-step-{number}", self.job.steps_done)


def main(job):
    net = WithExtra(job) if FORM == "extra" else Net(job)
    model = DistributedDataParallel(net, find_unused_parameters=FORM == "zeroed") if FORM != "by-hand" else net
    if FORM == "hook":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    if FORM in ("by-hand", "momenta"):
        optimizer = ByHand(net.parameters(), job=job, momenta=FORM == "momenta")
    else:
        optimizer = torch.optim.AdamW(net.net.parameters() if FORM == "groups" else net.parameters(), lr=0.05)
    job.track(model=model, optimizer=optimizer)
    for inputs, targets in job.batches(Numbered(), batch_size=10, epochs=5):
        at("begin", job.steps_done)
        net.zero_grad(set_to_none=FORM != "zeroed")
        if FORM == "groups" and job.steps_done == 8:
            optimizer.add_param_group({"params": [*net.now_and_then.parameters()], "lr": 0.01})
        if FORM == "decay":
            for each in net.parameters():
                each.data.mul_(0.99)
        if FORM == "slowed":
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        at("after-update", job.steps_done)
        job.step(loss=loss)
        if job.steps_done == 7 and f"leaves-{job.rank}" == FORM:
            break
        if job.steps_done == 7 and f"exits-{job.rank}" == FORM:
            sys.exit(3)


if __name__ == "__main__":
    muster.Job(sys.argv[1], save_every=10, log_every=5, timeout_s=20).run(main)
