"""Cross-entropy for next-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from muster.errors import ConfigError
from muster.train.objectives.classification import labels_that_do_not_fit
from muster.train.objectives.counted import labels, times


class LanguageModeling:
    """Mean cross-entropy per token of `[B, T, classes]` logits and `[B, T] int64` next tokens (-100: left out), computed in fp32."""

    def __init__(self) -> None:
        self._in_training = _cross_entropy

    def compile_loss(self) -> None:
        """Fuse the loss of training from here on: logits in bf16 are then not copied to fp32, which takes twice their memory."""
        self._in_training = torch.compile(_cross_entropy)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets of other types, which torch may take or not, are not compiled."""
        is_int64 = isinstance(targets, Tensor) and targets.dtype is torch.int64
        return _loss(self._in_training if is_int64 else _cross_entropy, outputs, targets)

    count = staticmethod(labels)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Any]]:
        """Return sums over tokens, and their number: `loss`, and `accuracy`, the number of correct tokens."""
        loss, count = _loss(_cross_entropy, outputs, targets), self.count(targets)
        return {"loss": (times(loss, count), count), "accuracy": ((outputs.argmax(-1) == targets).sum(), count)}


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def _loss(of: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    if isinstance(outputs, Tensor) and outputs.dim() != 3:
        raise ConfigError(
            f"objective=language_modeling expects logits [B, T, classes], but the model returns {outputs.dim()} dimensions: try objective=classification"
        )
    try:
        return of(outputs, targets)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        raise labels_that_do_not_fit("language_modeling", outputs, targets, error) from error
