"""Handwritten digits with DistributedDataParallel: torchrun --nproc-per-node=2 FILE"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import muster


def run_batch(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def main(job):
    inputs, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets))
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    for inputs, targets in job.batches(data, batch_size=64, epochs=5):  # 64 over all ranks
        loss = run_batch(model, optimizer, inputs, targets)
        job.step(loss=loss)


if __name__ == "__main__":
    muster.Job("runs/digits", save_every=20).run(main)
