"""Models for 8 x 8 digits whose constructors do more than make parameters."""

import torch
from torch import nn


class Busy(nn.Module):
    """Tied weights, a table in no state dict, plain tensors, weights that are set at the end, numbers read from tensors."""

    def __init__(self, hidden=32, num_classes=10):
        super().__init__()
        self.rates = [each.item() for each in torch.linspace(0.5, 1, 2)]
        self.first = nn.Linear(64, hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.before, self.after = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.after.weight = self.before.weight
        self.last = nn.Linear(hidden, num_classes)
        self.register_buffer("table", torch.rand(hidden), persistent=False)
        self.slopes = torch.arange(hidden) / hidden
        self.apply(self._start)

    @staticmethod
    def _start(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            with torch.no_grad():
                module.bias.copy_(torch.linspace(-0.1, 0.1, len(module.bias)))

    def forward(self, x):
        x = self.first(x.flatten(1)).relu() * self.slopes + self.table
        for rate, block in zip(self.rates, self.blocks, strict=True):
            x = x + rate * block(x).relu()
        return self.last(self.after(self.before(x).relu()))


class Drawing(Busy):
    """Draws a plain tensor after its weights, which a constructor without weights would draw otherwise."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.rand(32)


class Reading(Busy):
    """Reads its weights."""

    def __init__(self):
        super().__init__()
        self.rates = [block.weight.detach().norm().item() for block in self.blocks]


class Holding(Busy):
    """Holds a copy of its weights, and a module that is not registered."""

    def __init__(self):
        super().__init__()
        self.held = [self.first.weight.detach().clone()]
        self.fixed = (nn.Linear(32, 32),)

    def forward(self, x):
        return super().forward(x) + self.fixed[0](self.table).mean() + self.held[0].mean()
