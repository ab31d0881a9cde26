"""Step the parameters of each device mesh together: torch's fused and foreach kernels take no mixture.

A model with sharded layers has DTensors of one or two meshes and plain tensors. Parameter by parameter, a step of it on a
GPU takes several times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from muster.world.dtensor import in_pieces


def step_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer` step each group in parts of one mesh. Its groups stay as they are between steps.

    An optimizer that is not torch's own may change its groups as it steps, so it steps parameter by parameter.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        for group in optimizer.param_groups:
            if len(_parts(group["params"])) > 1:
                group.update({key: False for key in ("fused", "foreach") if key in group})
        return
    parting = Parting()
    optimizer.register_step_pre_hook(parting.before)  # after those of fused.py: they see whole groups
    optimizer.register_step_post_hook(parting.after)


class Parting:
    """Hooks that divide an optimizer's groups before a step and put them back after it."""

    def __init__(self) -> None:
        self._whole: list[dict[str, Any]] | None = None

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._whole = optimizer.param_groups
        optimizer.param_groups = [_options(part, group) for group in self._whole for part in _parts(group["params"])]

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._whole is not None
        optimizer.param_groups, self._whole = self._whole, None


def _parts(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters by mesh, those that are plain tensors as one part; an empty list as one empty part."""
    parts: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        parts.setdefault(parameter.device_mesh if in_pieces(parameter) else None, []).append(parameter)
    return list(parts.values()) or [[]]


def _options(part: list[nn.Parameter], group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `part`. By itself torch takes foreach kernels on GPUs for plain tensors alone."""
    options = {**group, "params": part}
    if part and in_pieces(part[0]):
        if options.get("fused") and "momentum" in options:
            options["fused"] = False  # torch has no fused SGD on DTensors
        if options.get("foreach", False) is None and not options.get("fused") and part[0].is_cuda:
            options["foreach"] = True
    return options
