"""The configured optimizer over a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from train.config.keys import Precision
from train.config.parts import Part, build
from train.errors import ConfigError

FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")


def build_optimizer(
    part: Part, parameters: Iterable[torch.nn.Parameter], *, precision: Precision
) -> torch.optim.Optimizer:
    """The configured optimizer over `parameters`, in its fused form where torch has one for CPU and CUDA alike.

    Not under fp16: the loss scaler lets a fused SGD skip its first step, and its momentum is uninitialised after that.
    """
    fused = part.target in FUSED and precision is not Precision.fp16
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to optimise")
    optimizer: Any = build(part, trainable, **({"fused": True} if fused else {}))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer  # type: ignore[no-any-return]
