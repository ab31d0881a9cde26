"""Metrics with the interface of torchmetrics."""

import os

import torch
import torchmetrics
from torch import nn


class Distance(torchmetrics.Metric):
    """A mean of floats, whose rounding depends on the order of the sum."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("seen", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.total += ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).sum()
        self.seen += len(targets)

    def compute(self):
        return self.total / self.seen


class Largest(torchmetrics.Metric):
    """The most samples that went through the model at once."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("most", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, outputs, targets):
        self.most = self.most.clamp(min=len(targets))

    def compute(self):
        return self.most


class Spread(torchmetrics.Metric):
    """Depends on the order of all outputs, which it keeps in a list."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.outputs.append(outputs.flatten())

    def compute(self):
        return torchmetrics.utilities.data.dim_zero_cat(self.outputs).cumsum(0).std()


class Plain:
    """A mean distance of a user's own, which knows nothing of other ranks, and has nothing to move to a device."""

    def __init__(self):
        self.reset()

    def update(self, outputs, targets):
        self.total += float((outputs.argmax(1) - targets).abs().sum())
        self.seen += len(targets)

    def compute(self):
        return self.total / self.seen

    def reset(self):
        self.total = self.seen = 0.0


class Summed(Plain):
    """The same, added up over the ranks."""

    def compute(self):
        both = torch.tensor([self.total, self.seen], dtype=torch.float64)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(both)
        return float(both[0] / both[1])


class Downward(torchmetrics.MeanAbsoluteError):
    """Less of it is better, as it says itself."""

    def update(self, outputs, targets):
        super().update(outputs.argmax(1), targets)


class Forgetful(torchmetrics.Metric):
    """Counts in an attribute that torchmetrics does not know of."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.seen = 0.0

    def update(self, outputs, targets):
        self.seen += float((targets == 3).sum())

    def compute(self):
        return torch.tensor(self.seen)

    def reset(self):
        super().reset()
        self.seen = 0.0


class OnFirst(Summed):
    """Computes on rank 0 alone; the values of others say that there is none."""

    def compute(self):
        value = super().compute()
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return value if is_first else float("nan")


class Seen(Plain):
    """The number of samples of its own rank: the same on each."""

    def compute(self):
        return self.seen


class Undefined(Plain):
    """Undefined on all ranks but the first, whose samples alone it is of."""

    def compute(self):
        return super().compute() if int(os.environ.get("RANK", "0")) == 0 else float("nan")


class Constant(Plain):
    """The same on all ranks, whatever the samples are."""

    def compute(self):
        return 7.0


class Counting(torchmetrics.Metric):
    """Its own mean over its own samples, of which one part is declared."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")
        self.right = 0.0

    def update(self, outputs, targets):
        self.right += float((outputs.argmax(1) == targets).sum())
        self.count += len(targets)

    def compute(self):
        return self.right / self.count


class Given:
    """Gives one value after the other, the same on all ranks."""

    higher_is_better = True

    def __init__(self, values):
        self.values, self.turn = list(values), 0

    def update(self, outputs, targets):
        self.seen = torch.zeros(1)

    def compute(self):
        torch.distributed.all_reduce(self.seen) if torch.distributed.is_initialized() else None
        self.turn += 1
        return self.values[self.turn - 1]

    def reset(self):
        pass
