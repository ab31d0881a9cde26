"""A recurrent model whose hidden state goes from batch to batch: `python carried.py FOLDER HOW` keeps it as HOW says.

buffer: in a buffer of each rank. rule: in a variable, which has the rate, too. iterated: in a variable of a loop with batches of its own.
reset: each batch begins anew. draws: so it does, with noise of a generator of its own; seeds: which it seeds. With DRAWS=N it has drawn numbers before the job, of the seed N.
With SEED=N it seeds torch in the job.
"""

import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muster

if "DRAWS" in os.environ:
    torch.manual_seed(int(os.environ["DRAWS"]))
    np.random.seed(int(os.environ["DRAWS"]))
    torch.rand(1), np.random.rand(1)
DATA = torch.randn(96, 5, 3, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, hidden):
        y, hidden = self.cell(x, hidden)
        return self.out(y), hidden


class Own(Recurrent):
    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", torch.zeros(2, 1, 12, 4))

    def forward(self, x, _):
        y, hidden = super().forward(x, tuple(self.hidden[:, :, : len(x)].clone()))
        self.hidden[:, :, : len(x)] = torch.stack(hidden).detach()
        return y, None


def main(job, how):
    if "SEED" in os.environ:
        torch.manual_seed(int(os.environ["SEED"]))
    net, hidden, rate = (Own if how == "buffer" else Recurrent)(), None, 0.1
    model = DistributedDataParallel(net, broadcast_buffers=False) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, **({} if how == "rule" else {"optimizer": optimizer}))
    for x in DATA.split(12) if how == "iterated" else job.batches(DATA, batch_size=12, epochs=1, shuffle=False):
        optimizer.zero_grad()
        if how == "seeds":
            SEEDED.manual_seed(job.steps_done)
        if how in ("draws", "seeds"):
            x = x + torch.rand((), generator=OWN if how == "draws" else SEEDED)
        if how in ("reset", "draws", "seeds"):
            y, _ = model(x, None)
        else:
            y, hidden = model(x, hidden)
        hidden = hidden and tuple(each.detach() for each in hidden)
        loss = y.pow(2).mean()
        loss.backward()
        if how == "rule":
            with torch.no_grad():
                for each in model.parameters():
                    each -= rate * each.grad
            model.zero_grad()
        else:
            optimizer.step()
        job.step(loss=loss)


OWN, SEEDED = torch.Generator().manual_seed(0), torch.Generator()

if __name__ == "__main__":
    muster.Job(sys.argv[1], save_every=3, tensorboard=False).run(main, sys.argv[2])
