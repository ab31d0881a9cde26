"""A GAN: a generator and a discriminator that `strategy=turns` trains in turn.

Source: Goodfellow et al., "Generative Adversarial Networks", 2014.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class Ring(torch.utils.data.TensorDataset):
    """`[2] float32` points near a circle; the target is the point itself."""

    def __init__(self, *, train: bool, size: int):
        generator = torch.Generator().manual_seed(int(train))
        angle = torch.rand(size if train else size // 5, generator=generator) * 2 * torch.pi
        points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(len(angle), 2, generator=generator)
        super().__init__(points, points)


class Adversaries(nn.Module):
    """`generator` maps noise to points; `discriminator` maps points to a logit, above 0 for real points."""

    def __init__(self, *, noise: int, width: int):
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def fakes(self, number: int) -> Tensor:
        made: Tensor = self.generator(torch.randn(number, self.noise))
        return made

    def loss_of(self, part: str, points: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `generator` or `discriminator`."""
        judged = self.discriminator(self.fakes(len(points)))
        if part == "generator":
            return softplus(-judged).mean()
        return (softplus(-self.discriminator(points)) + softplus(judged)).mean()

    def forward(self, points: Tensor) -> Tensor:
        """Return as many generated points as given, for an evaluation."""
        return self.fakes(len(points))


class Distance:
    """Mean distance of generated points from the circle."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.norm(dim=1) - 1).abs().mean()
