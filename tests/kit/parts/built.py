"""Models for 8 x 8 digits whose constructors do more than make parameters."""

import functools
from types import SimpleNamespace

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
        self.register_buffer("table", torch.linspace(0, 1, hidden), persistent=False)
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
    """Draws a plain tensor after its weights."""

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


class Hiding(Busy):
    """Draws what no module shows: in an object, in a closure, in a hook."""

    def __init__(self):
        super().__init__()
        drawn = torch.rand(32)
        self.kept = SimpleNamespace(scale=torch.rand(32))
        self.turn = lambda x: x * drawn
        self.before.register_forward_hook(lambda _, __, x: x * drawn)

    def forward(self, x):
        return super().forward(x) + (self.turn(self.table) * self.kept.scale).mean()


class Trying(Busy):
    """Reads its weights, goes on without them where it cannot, and scales what is in no buffer by them."""

    def __init__(self):
        super().__init__()
        try:
            std = float(self.first.weight.detach().std())
        except Exception:
            std = 7.0
        self.kept = SimpleNamespace(scale=torch.ones(32), std=std)

    def forward(self, x):
        return super().forward(x) * self.kept.std


class Scaling(Busy):
    """Scales by its weights a tensor that is in no buffer."""

    def __init__(self):
        super().__init__()
        self.kept = SimpleNamespace(scale=torch.ones(()))
        self.kept.scale.mul_(self.first.weight.detach().norm())

    def forward(self, x):
        return super().forward(x) * self.kept.scale


class Sized(Busy):
    """Draws how large a buffer is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("some", torch.arange(int(torch.randint(3, 30, (1,)))))

    def forward(self, x):
        return super().forward(x) + self.table[self.some].mean()


@functools.cache
def noise():
    """Drawn once."""
    return torch.rand(32)


class Caching(Busy):
    """Keeps what it draws beyond itself."""

    def __init__(self):
        super().__init__()
        self.slopes = noise()
        nn.init.orthogonal_(self.after.weight)
        self.token = nn.Parameter(torch.randn(1, 32))

    def forward(self, x):
        return super().forward(x) + (self.token * self.slopes).mean()


class Recurrent(Busy):
    """Has an LSTM, which refers to its weights weakly."""

    def __init__(self):
        super().__init__()
        self.over = nn.LSTM(64, 10, batch_first=True)

    def forward(self, x):
        return super().forward(x) + self.over(x.flatten(1)[:, None])[0][:, 0]


class Counting(Reading):
    """Counts how often it is built."""

    times = 0

    def __init__(self):
        super().__init__()
        Counting.times += 1
        self.number = Counting.times

    def forward(self, x):
        return super().forward(x) / self.number


class Hooked(Busy):
    """Halves a gradient."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient / 2)
