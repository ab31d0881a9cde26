"""Cross-entropy over classes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from train.errors import ConfigError


class Classification:
    """Cross-entropy of `[B, classes]` logits and `[B] int64` labels."""

    def __init__(self, label_smoothing: float):
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
