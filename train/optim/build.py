"""The configured optimizer over a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from train.config.keys import Precision
from train.config.parts import Part, build
from train.errors import ConfigError

FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
FUSED_IN_PIECES = ("torch.optim.Adam", "torch.optim.AdamW")


def build_optimizer(
    part: Part, parameters: Iterable[torch.nn.Parameter], *, precision: Precision
) -> torch.optim.Optimizer:
    """The configured optimizer over `parameters`, in its fused form where torch has one for CPU and CUDA alike.

    Not under fp16: the loss scaler lets a fused SGD skip its first step, and its momentum is uninitialised after that.
    Nor SGD on parameters in pieces: torch knows no such operation on a DTensor.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    names = FUSED_IN_PIECES if any(isinstance(parameter, DTensor) for parameter in trainable) else FUSED
    fused = part.target in names and precision is not Precision.fp16
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to optimise")
    optimizer: Any = build(part, trainable, **({"fused": True} if fused else {}))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer  # type: ignore[no-any-return]
