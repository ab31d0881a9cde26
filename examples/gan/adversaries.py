"""A GAN: two models trained in turn by a custom strategy.

Source: Goodfellow et al., "Generative Adversarial Networks", 2014.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

from muster.batches.loader import Batch
from muster.dist.world import World
from muster.train.strategies.base import Recipe, StepResult
from muster.train.strategies.replicas.broadcast import broadcast
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping, build_model


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

    def forward(self, points: Tensor) -> Tensor:
        """Return as many generated points as given, for an evaluation."""
        return self.fakes(len(points))


class Distance:
    """Mean distance of generated points from the circle."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.norm(dim=1) - 1).abs().mean()


class Gan(Stepping):
    """Takes one step of the discriminator, then one of the generator, on the same micro-batches.

    The optimizer has the parameters of both and skips those without a gradient.
    """

    def build(self, recipe: Recipe, world: World) -> None:
        self.world = world
        self.model = build_model(recipe, world.device)
        if world.size > 1:
            broadcast(self.model.parameters())
        self.optimizer_step = OptimizerStep(recipe, world=world, layout=self.layout(world.size), model=self.model)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self._turn(step, batches, self.model.discriminator, self._fooled)
        loss = self._turn(step, batches, self.model.generator, lambda batch: softplus(-self._judge_fakes(batch)))
        return StepResult(loss, self.optimizer_step.norm)

    def _turn(self, step, batches, part, losses):
        """Take one step of `part`; return this rank's share of its loss."""
        self.optimizer_step.optimizer.zero_grad()
        shares = [losses(batch).mean() * (batch.count / batch.total) for batch in batches]
        torch.stack(shares).sum().backward()
        for parameter in self.model.parameters():
            if not any(parameter is own for own in part.parameters()):
                parameter.grad = None
            elif self.world.size > 1:
                dist.all_reduce(parameter.grad)  # gradients of shares of the global mean: their sum is its gradient
        self.optimizer_step.update(step, None)
        return torch.stack(shares).sum().detach()

    def _fooled(self, batch: Batch) -> Tensor:
        return softplus(-self.model.discriminator(batch.inputs)) + softplus(self._judge_fakes(batch, detach=True))

    def _judge_fakes(self, batch: Batch, *, detach: bool = False) -> Tensor:
        fakes = self.model.fakes(len(batch.inputs))
        return self.model.discriminator(fakes.detach() if detach else fakes)
