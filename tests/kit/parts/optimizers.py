"""Optimizers with unusual state."""

import torch


class Fading(torch.optim.SGD):
    """Its learning rate falls with a step count in its group, as in schedule-free optimizers."""

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
    """Has no learning rate; its steps shrink with a step count under an unusual name."""

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
    """Return an optimizer with a learning rate of its own."""
    return torch.optim.Adam(params, lr=0.02)


def nothing(params):
    """Forget to return the optimizer."""


class FewRates(torch.optim.lr_scheduler.LRScheduler):
    """A schedule with only three steps."""

    def get_lr(self):
        return [[0.1, 0.2, 0.3][self.last_epoch] for _ in self.optimizer.param_groups]
