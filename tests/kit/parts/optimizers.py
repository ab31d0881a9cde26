"""Optimizers that keep state where others have none."""

import torch


class Fading(torch.optim.SGD):
    """Its rate falls with a count that it keeps in its group, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] /= group["count"]
        return super().step(closure)
