"""What is minimised and what is measured.

An objective is called with `(outputs, targets)` and gives the mean loss over the micro-batch's samples, `[] float`.
Its `metrics`, where it has them, gives sums over samples: evaluation adds them up over ranks and divides by the
number of samples. Any loss of torch.nn with the mean reduction serves as one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from train.errors import ConfigError


class Classification:
    """Cross-entropy of `[B, classes]` logits and `[B] int64` labels."""

    def __init__(self, label_smoothing: float = 0.0):
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"objective.label_smoothing={label_smoothing} is out of range: use 0 up to 1")
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() != 2:
            raise ConfigError(
                f"objective=classification takes logits [B, classes], and the model gives {outputs.dim()} dimensions: try objective=language_modeling"
            )
        return F.cross_entropy(outputs.float(), targets, label_smoothing=self.label_smoothing)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(outputs.float(), targets, reduction="sum")
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == targets).sum()}


class LanguageModeling:
    """Cross-entropy of `[B, T, classes]` logits and `[B, T] int64` next tokens, per token."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() != 3:
            raise ConfigError(
                f"objective=language_modeling takes logits [B, T, classes], and the model gives {outputs.dim()} dimensions: try objective=classification"
            )
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        right = (outputs.argmax(-1) == targets).float().mean(-1).sum()
        return {"loss": self(outputs, targets) * len(targets), "accuracy": right}


def sums(objective: Any, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The objective's metrics summed over the micro-batch; of a bare loss function, the loss."""
    if hasattr(objective, "metrics"):
        metrics: dict[str, Tensor] = objective.metrics(outputs, targets)
        return metrics
    return {"loss": objective(outputs, targets) * len(outputs)}
