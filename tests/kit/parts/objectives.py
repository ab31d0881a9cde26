"""A loss without metrics."""

from torch import nn


class MeanSquares:
    """A loss of one's own without metrics."""

    def __call__(self, outputs, targets):
        return ((outputs - nn.functional.one_hot(targets, outputs.shape[1])) ** 2).mean()
