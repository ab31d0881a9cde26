"""A vision transformer on handwritten digits, sharded by fully_shard: torchrun --nproc-per-node=2 fsdp2.py [FOLDER] [STEPS]"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import muster

ROWS, WIDTH, HEADS, LAYERS = 8, 32, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        normed = self.first(x)
        x = x + self.mix(normed, normed, normed, need_weights=False)[0]
        return x + self.feed(self.second(x))


class Transformer(nn.Module):
    """Reads an image [B, 64] row by row; returns logits [B, 10]."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(ROWS, WIDTH), nn.Parameter(0.02 * torch.randn(ROWS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images):
        x = self.blocks(self.embed(images.unflatten(1, (ROWS, ROWS))) + self.places)
        return self.head(self.norm(x).mean(1))


def sharded(model):
    """Shard each block by itself, so that only one at a time is whole."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main(job, steps):
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    train, test = (torch.utils.data.Subset(data, range(*ends)) for ends in ((0, 1500), (1500, len(data))))
    model = sharded(Transformer().to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    for images, digits in job.batches(train, batch_size=64, max_steps=steps):
        loss = nn.functional.cross_entropy(model(images), digits)
        (loss * job.weight).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        job.step(loss=loss, grad_norm=norm)
        if job.ends_epoch:
            job.evaluate(test, lambda batch: {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()})


if __name__ == "__main__":
    with muster.Job(sys.argv[1] if sys.argv[1:] else "runs/fsdp2", save_every=20) as job:
        main(job, int(sys.argv[2]) if sys.argv[2:] else 200)
