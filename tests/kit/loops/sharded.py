"""A loop over a model that fully_shard has sharded: `python sharded.py FOLDER`."""

import sys

import torch
from ddp import Numbered, disturb, note
from torch import nn
from torch.distributed.fsdp import fully_shard

import muster

if __name__ == "__main__":
    with muster.Job(sys.argv[1], save_every=5, log_every=1, tensorboard=False) as job:
        model = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 2)).to(job.device)
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        job.track(model=model, optimizer=optimizer)
        for indices, x, y in job.batches(Numbered(), batch_size=12, epochs=3):
            note(job.steps_done, job.rank, indices.tolist() if job.weight else [])
            disturb(job.steps_done)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * job.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step(loss=loss)
