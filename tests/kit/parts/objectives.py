"""A loss without metrics, and one that is slow to evaluate."""

import time

import torch
from torch import nn

from muster.train.objectives.classification import Classification


class MeanSquares:
    """A loss without metrics."""

    def __call__(self, outputs, targets):
        return ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).mean()


class Drawn(nn.Module):
    """Class weights from unseeded generators: a buffer, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        own = torch.Generator()
        own.seed()
        self.register_buffer("weight", torch.rand(10, generator=own) + 0.5)
        self.scale = nn.Parameter(torch.rand(1, generator=own) + 0.5, requires_grad=False)
        Drawn.drawn = {"weight": self.weight.tolist(), "scale": self.scale.tolist()}

    def forward(self, outputs, targets):
        return self.scale[0] * nn.functional.cross_entropy(outputs, targets, weight=self.weight)


class SlowToMeasure(Classification):
    """Slow enough for a test to stop a run during an evaluation."""

    def __init__(self):
        super().__init__(label_smoothing=0.0)

    def metrics(self, outputs, targets):
        time.sleep(2)
        return super().metrics(outputs, targets)
