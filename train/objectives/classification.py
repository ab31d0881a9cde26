"""Cross-entropy for classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from muster.code_location import described
from muster.errors import ConfigError, DataError
from muster.train.objectives.counted import labels

NO_LABELS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.bool,
)


class Classification:
    """Cross-entropy of `[B, classes]` logits and `[B] int64` labels, of which -100 are left out."""

    def __init__(self, label_smoothing: float):
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"objective.label_smoothing={label_smoothing} is out of range: use 0 up to 1")
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor) and outputs.dim() != 2:
            raise ConfigError(
                f"objective=classification expects logits [B, classes], but the model returns {outputs.dim()} dimensions: try objective=language_modeling"
            )
        try:
            return F.cross_entropy(outputs.float(), targets, label_smoothing=self.label_smoothing)
        except (IndexError, RuntimeError, ValueError, TypeError) as error:
            raise labels_that_do_not_fit("classification", outputs, targets, error) from error

    count = staticmethod(labels)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Any]]:
        """Return sums over the labels, and their number: `loss`, and `accuracy`, the number of correct predictions."""
        loss, count = F.cross_entropy(outputs.float(), targets, reduction="sum"), self.count(targets)
        count = count if count is not None else torch.tensor(len(targets))  # of probabilities
        classes = targets.argmax(-1) if targets.is_floating_point() else targets
        return {"loss": (loss, count), "accuracy": ((outputs.argmax(-1) == classes).sum(), count)}


def labels_that_do_not_fit(objective: str, outputs: Any, targets: Any, error: Exception) -> Exception:
    """Return a DataError that says why `targets` are not labels for `[..., classes]` outputs; else `error`."""
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return error
    *shape, classes = outputs.shape
    found = None
    if not isinstance(targets, Tensor) or [*targets.shape] != shape or targets.dtype in NO_LABELS:
        remedy = "write .long() where the data set makes them" if _is_only_type(targets, shape) else "fix the labels"
        if isinstance(targets, Tensor) and targets.is_floating_point():
            remedy += "; if they are values to predict, objective._target_=torch.nn.MSELoss"
        given = f"{list(targets.shape)} {targets.dtype}" if isinstance(targets, Tensor) else described(targets)
        found = DataError(f"objective={objective} expects labels {shape} int64, but the data has {given}: {remedy}")
    elif wrong := targets[(targets < 0) | (targets.long() >= classes)].tolist():  # 256 is 0 among bytes
        found = DataError(
            f"the data has label {wrong[0]}, but the model has {classes} classes, 0 to {classes - 1}: "
            "fix the labels, or set num_classes in the data set or the model"
        )
    if found:
        found.of_data = True
    return found or error


def _is_only_type(targets: Any, shape: list[int]) -> bool:
    return isinstance(targets, Tensor) and [*targets.shape] == shape
