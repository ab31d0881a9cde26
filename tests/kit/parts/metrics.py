"""A metric that keeps a list, as curves do."""

import torch
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


class Rows(Metric):
    """What was right, times two to the class: of rows of whole numbers."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.rows.append(torch.stack([outputs.argmax(1), targets], 1))

    def compute(self):
        rows = dim_zero_cat(self.rows)
        return (rows[:, 0] * 10 + rows[:, 1]).double().sum()
