"""A metric that keeps a list, like curves."""

import torch
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


class Rows(Metric):
    """A sum over rows of predicted class and target, which it keeps in a list."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.rows.append(torch.stack([outputs.argmax(1), targets], 1))

    def compute(self):
        rows = dim_zero_cat(self.rows)
        return (rows[:, 0] * 10 + rows[:, 1]).double().sum()
