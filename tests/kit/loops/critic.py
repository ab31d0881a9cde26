"""A generator and a critic, whose gradients are dropped before its pass: `python critic.py FOLDER`. FORM: `none` or `zeros`.

With `cycle` the generator's pass comes first, and adds to the gradients that the critic has left. With `listed`
a list outside of the function keeps outputs.
"""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault

FORM = os.environ["FORM"]
LISTED = []
INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def main(job):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    critic = DistributedDataParallel(torch.nn.Linear(4, 1), gradient_as_bucket_view=True)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, critic))
    job.track(model=model, critic=critic, first=first, second=second)

    def of_generator(made):
        loss = critic(made).pow(2).mean()
        loss.backward()
        first.step()
        first.zero_grad(set_to_none=FORM != "zeros")
        return loss

    for x in job.batches(INPUTS, batch_size=8, epochs=1):
        if FORM == "listed":
            LISTED.append(model(x).sum())
            fault("listed", job.steps_done)
            sum(LISTED).backward()
            LISTED.clear()
            first.step()
            first.zero_grad()
            job.step()
            continue
        made = model(x)
        fault("made", job.steps_done)
        loss = of_generator(made) if FORM == "cycle" else None
        second.zero_grad(set_to_none=FORM != "zeros")
        fault("forward", job.steps_done)
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        second.step()
        fault("stepped", job.steps_done)
        job.step(loss=of_generator(made) if loss is None else loss)


if __name__ == "__main__":
    muster.Job(sys.argv[1], save_every=20, log_every=100, tensorboard=False, timeout_s=20).run(main)
