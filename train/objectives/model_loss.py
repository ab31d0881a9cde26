"""The loss that the model computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muster.errors import ConfigError


class ModelLoss:
    """Returns the model's output `loss`, a mean over the micro-batch, as Hugging Face models give it for `labels`."""

    of_model = True

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"objective=model_loss uses the model's own loss, but {type(outputs).__name__} has none: "
                "give the model labels in its inputs, or use another objective"
            )
        return loss
