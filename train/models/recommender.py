"""Click model: the mean of the items' embeddings, then a multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from muster.errors import ConfigError


class Recommender(nn.Module):
    """Maps `[B, K] int64` items to `[B, classes]` logits. Most parameters are in `embedding`, [num_items, dim]."""

    def __init__(
        self, *, input_shape: Sequence[int], num_classes: int, num_items: int, dim: int, hidden: Sequence[int]
    ):
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigError(
                f"model=recommender expects lists of items [K], but the data's inputs are {list(input_shape)}: use data=clicks"
            )
        widths = [dim, *hidden]
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.embedding = nn.EmbeddingBag(num_items, dim, mode="mean")
        self.dense = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, items: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.embedding(items))
        return logits
