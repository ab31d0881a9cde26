"""Base class of datasets without files, whose samples are computed from their index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from muster.sample_plan import Keys


class Generated(ABC):
    """A training split of `num_samples`; the test split is a tenth as long and uses the indices after them."""

    def __init__(self, train: bool, *, num_samples: int):
        self.num_samples = num_samples if train else max(1, num_samples // 10)
        self.first = 0 if train else num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    @abstractmethod
    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Return `[B, ...]` inputs and `[B]` targets."""
