"""The loop by hand with `muster.Job` in it: the adapter by_hand.py after the changes of docs/your-own-loop.md."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import muster
from bench.conformance.parts import BATCH, KEEP, LR, SAVE_EVERY, Net, Points
from bench.conformance.trainers.base import Trainer, numbered, script
from bench.conformance.trainers.ours import logged


def main(job: muster.Job, epochs: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    job.track(model=model, optimizer=optimizer)
    for inputs, targets in job.batches(Points(), batch_size=BATCH, epochs=epochs, num_workers=1):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        job.step(loss=loss)


TRAINER = Trainer(
    title="by hand with Job",
    packages=(),
    worker=script("bench.conformance.trainers.own_loop"),
    checkpoints=lambda folder: numbered([*folder.glob("checkpoints/step-*")]),
    metrics=logged,
    weights="model.pt",
)

if __name__ == "__main__":
    job = muster.Job(Path(sys.argv[1]), save_every=SAVE_EVERY, keep=KEEP, log_every=1, tensorboard=False)
    job.run(partial(main, epochs=int(sys.argv[2])))
