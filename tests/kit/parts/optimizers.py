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


class NoRate(torch.optim.Optimizer):
    """Has no learning rate; counts its steps under a name of its own, and by the count its steps get smaller."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["count"] = self.state.get("count", torch.zeros(1)) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=0.01 / float(self.state["count"]))
                    self.state[parameter]["sign"] = parameter.grad.sign()


def own_rate(params):
    """Makes an optimizer with a rate that no config names."""
    return torch.optim.Adam(params, lr=0.02)


def nothing(params):
    """Forgets to give back what it makes."""


class FewRates(torch.optim.lr_scheduler.LRScheduler):
    """Has the rates of three steps."""

    def get_lr(self):
        return [[0.1, 0.2, 0.3][self.last_epoch] for _ in self.optimizer.param_groups]
