"""Cross-entropy over classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from train.errors import ConfigError, DataError


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
        try:
            return F.cross_entropy(outputs.float(), targets, label_smoothing=self.label_smoothing)
        except (IndexError, RuntimeError, ValueError) as error:
            raise labels_that_do_not_fit(outputs, targets, error) from error

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(outputs.float(), targets, reduction="sum")
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == targets).sum()}


def labels_that_do_not_fit(outputs: Tensor, targets: Any, error: Exception) -> Exception:
    """Why `targets` are no labels for `[B, classes]` outputs; `error` itself if they are."""
    if not isinstance(targets, Tensor) or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        given = f"{list(targets.shape)} {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        return DataError(f"objective=classification takes labels [{len(outputs)}] int64, and the data gives {given}")
    wrong = targets[(targets < 0) | (targets >= outputs.shape[1])].tolist()
    if wrong:
        return DataError(
            f"the data has label {wrong[0]}, and the model gives {outputs.shape[1]} classes, 0 to {outputs.shape[1] - 1}: "
            "mend the labels, or say num_classes in the data set or the model"
        )
    return error
