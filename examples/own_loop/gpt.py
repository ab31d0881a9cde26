"""A small GPT on the characters of Python's own modules, in one file: torchrun --nproc-per-node=2 gpt.py [FOLDER] [STEPS]"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import muster

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
TEXT = "".join(Path(sys.modules[name].__file__).read_text() for name in ("argparse", "dataclasses", "pathlib"))
LETTERS = sorted(set(TEXT))


class Characters(torch.utils.data.Dataset):
    """Sample i is the text from letter i * LENGTH on: [LENGTH] inputs, and the letter that follows each."""

    def __init__(self, text):
        self.letters = torch.tensor([LETTERS.index(letter) for letter in text])

    def __len__(self):
        return (len(self.letters) - 1) // LENGTH

    def __getitem__(self, index):
        part = self.letters[index * LENGTH : (index + 1) * LENGTH + 1]
        return part[:-1], part[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.mix(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters):
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        return self.head(self.norm(self.blocks(x)))


def losses(model, batch):
    """The mean loss of each sample, [B]."""
    letters, following = batch
    return nn.functional.cross_entropy(model(letters).transpose(1, 2), following, reduction="none").mean(1)


@torch.no_grad()
def sample(model, start, *, length):
    letters = torch.tensor([[LETTERS.index(letter) for letter in start]])
    for _ in range(length):
        odds = model(letters[:, -LENGTH:])[:, -1].softmax(1)
        letters = torch.cat([letters, torch.multinomial(odds, 1)], dim=1)
    return "".join(LETTERS[letter] for letter in letters[0])


def main(job, steps):
    cut = int(0.9 * len(TEXT))
    train, test = Characters(TEXT[:cut]), Characters(TEXT[cut:])
    model = GPT().to(job.device)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    job.track(model=ddp, optimizer=optimizer, schedule=schedule)
    for batch in job.batches(train, batch_size=16, max_steps=steps):
        loss = losses(ddp, batch).mean()
        (loss * job.weight).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        job.step(loss=loss, grad_norm=norm)
        if job.steps_done % 40 == 0:
            job.evaluate(test, lambda batch: {"loss": losses(ddp, batch)})
    return model.cpu().eval()


if __name__ == "__main__":
    with muster.Job(sys.argv[1] if sys.argv[1:] else "runs/gpt", save_every=20) as job:
        model = main(job, int(sys.argv[2]) if sys.argv[2:] else 200)
        is_first = job.is_first
    if is_first:
        print(sample(model, "def ", length=200))
