"""The state of optimizers, as it is read from checkpoints and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.checkpoint.trained import SavedTensor

STEP = "step"
"""Key of torch's count of steps of a parameter."""


def empty_state(key: str, facts: SavedTensor, parameter: Tensor) -> Tensor:
    """Return an empty tensor to read the entry `key` of a parameter's state into.

    It has the layout of the parameter if the shapes are equal, else it is not sharded. `step` is on the CPU, where torch
    leaves it for an optimizer that is neither fused nor capturable: such an optimizer reads it at each step, and would wait
    for the device for each parameter. For the others torch moves it to the parameter's device.
    """
    if key == STEP:
        return torch.empty(facts.size, dtype=facts.dtype)
    if facts.size == parameter.shape:
        return torch.empty_like(parameter, dtype=facts.dtype, requires_grad=False)
    return torch.empty(facts.size, dtype=facts.dtype, device=parameter.device)


def keep_types(optimizer: Optimizer, saved: Mapping[Any, Mapping[str, Any]]) -> None:
    """Restore the saved dtypes of an optimizer's loaded state, because torch casts it to the dtype of the parameter.

    saved: the state by parameter index. Entries under a string key belong to no parameter, and are never cast.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved.items():
        if isinstance(index, str):
            continue
        loaded = optimizer.state.get(parameters[index], {})
        for name, value in values.items():
            if isinstance(value, Tensor) and name in loaded and loaded[name].dtype != value.dtype:
                loaded[name] = value.detach().to(loaded[name].device)
