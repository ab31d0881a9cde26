"""The configured objective."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from train.config.parts import Part, bound
from train.errors import ConfigError


def build_objective(part: Part, *, device: torch.device) -> Any:
    """A function of (outputs, targets). That of a module belongs to the run's state as the model's buffers do.

    Raises:
        ConfigError: it cannot be built, or has parameters to train.
    """
    objective = bound(part, free=2)
    if not isinstance(objective, nn.Module):
        return objective
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            raise ConfigError(
                f"objective._target_={part.target} has a parameter to train, {name}, and only the model's are trained: keep it in "
                "the model, which may compute its own loss (objective=model_loss), or let it require no gradient"
            )
    return objective.to(device)
