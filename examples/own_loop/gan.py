"""A GAN on a ring of points, two models and two optimizers in a plain loop: torchrun --nproc-per-node=2 gan.py [FOLDER]"""

import math
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import muster


class Ring(torch.utils.data.Dataset):
    """Points on a circle, each with some noise of its own."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        angle = 2 * math.pi * index / len(self)
        return torch.tensor([math.cos(angle), math.sin(angle)]) + 0.05 * torch.randn(2)


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def wants(scores, real):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main(job):
    generator, critic = DDP(net(2, 2).to(job.device)), DDP(net(2, 1).to(job.device))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    job.track(
        generator=generator,
        critic=critic,
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
    )
    for real in job.batches(Ring(), batch_size=64, epochs=2):
        fake = generator(torch.randn_like(real))

        scores = critic(torch.cat([real, fake.detach()]))
        critic_loss = wants(scores[: len(real)], real=True) + wants(scores[len(real) :], real=False)
        (critic_loss * job.weight).backward()
        critic_optimizer.step()

        generator_loss = wants(critic(fake), real=True)
        (generator_loss * job.weight).backward()
        generator_optimizer.step()

        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()  # the generator's pass has added to these gradients, which else go into the next step

        job.step(loss=generator_loss, critic_loss=critic_loss, radius=fake.norm(dim=1).mean())


if __name__ == "__main__":
    with muster.Job(sys.argv[1] if sys.argv[1:] else "runs/gan", save_every=20) as job:
        main(job)
