"""Build the configured objective and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from muster.checkpoint.trained import extra_of
from muster.code_location import defined, name_of
from muster.errors import ConfigError
from muster.train.config.parts import Part, bound, build
from muster.train.objectives.measure import Measures
from muster.world.group import World


def build_objective(part: Part, *, device: torch.device) -> Any:
    """Build the objective, a callable of (outputs, targets).

    The state of one that is a module is part of the run's state, as the model's buffers are.
    Raises ConfigError: it cannot be built, or has parameters to train or extra state.
    """
    objective = bound(part, free=2)
    if not isinstance(objective, nn.Module):
        return objective
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            raise ConfigError(
                f"objective._target_={part.target} has a trainable parameter, {name}, but only the model's are trained: keep it in "
                "the model, which may compute its own loss (objective=model_loss), or let it require no gradient"
            )
    if extra := next(iter(extra_of(objective.state_dict())), ""):
        raise ConfigError(
            f"objective._target_={part.target} has {extra} (get_extra_state), and of an objective checkpoints have parameters and buffers only: "
            "keep it in a buffer"
        )
    return objective.to(device)


def build_measures(parts: Mapping[str, Part], *, world: World, sliced: bool = False) -> Measures:
    """Build the metrics of `metrics.NAME`. Raises ConfigError if one would cover only a part of the samples."""
    named = {name: _built(name, part, world.device) for name, part in parts.items()}
    if sliced or world.size > 1:
        for name, metric in named.items():
            _see_sync(name, metric, part="slice" if sliced else "rank")
    of = {name: part.aside["of"] for name, part in parts.items() if "of" in part.aside}
    anew = {name: partial(_built, name, part, torch.device("cpu")) for name, part in parts.items()}
    return Measures(named, sliced=sliced, of=of, anew=anew)


def _built(name: str, part: Part, device: torch.device) -> Any:
    metric = build(part)
    if missing := [each for each in ("update", "compute", "reset") if not callable(getattr(metric, each, None))]:
        raise ConfigError(
            f"metrics.{name}: {name_of(metric)} has no {missing[0]}{defined(metric)}: a metric has update(outputs, targets), "
            "compute() and reset()"
        )
    return metric.to(device) if hasattr(metric, "to") else metric


def _see_sync(name: str, metric: Any, *, part: str) -> None:
    for each in metric.modules() if isinstance(metric, nn.Module) else ():
        if getattr(each, "sync_on_compute", True) is False:
            raise ConfigError(
                f"metrics.{name} is a {type(each).__name__} with sync_on_compute=false, and would give the value of one {part}'s "
                "samples: leave sync_on_compute out; a metric that reduces its states itself must not be a torchmetrics.Metric, "
                "but can be any class with update, compute and reset"
            )
