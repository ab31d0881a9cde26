"""The configured optimizer over a model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from train.config.keys import Precision
from train.config.parts import Part, build, locate, signature
from train.dist.pieces import in_pieces
from train.errors import ConfigError, nearest
from train.patterns import matches

FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
FUSED_IN_PIECES = ("torch.optim.Adam", "torch.optim.AdamW")
MATCH = "match"
Named = tuple[str, nn.Parameter]


def build_optimizer(
    part: Part, named: Iterable[Named], *, precision: Precision, elsewhere: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """The configured optimizer over (name, parameter) pairs, in its fused form where torch has one for CPU and CUDA alike.

    `optimizer.groups` divides them; an optimizer, or a function that makes one, whose signature has `named_parameters`
    gets the pairs themselves.

    Not fused under fp16: the loss scaler lets a fused SGD skip its first step, and its momentum is uninitialised after that.
    Nor SGD on parameters in pieces: torch knows no such operation on a DTensor.

    `elsewhere` are the names of the model's parameters that only other ranks have.

    Raises:
        ConfigError: there is nothing to train, a group matches nothing, or the optimizer cannot do its step so.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to optimise")
    names = FUSED_IN_PIECES if any(in_pieces(parameter) for _, parameter in trainable) else FUSED
    options = {"fused": True} if part.target in names and precision is not Precision.fp16 else {}
    if "named_parameters" in signature(locate(part)):
        if part.aside:
            raise ConfigError(f"optimizer.groups: {part.target} takes named_parameters and groups them itself")
        optimizer: Any = build(part, named_parameters=trainable)
    else:
        optimizer = build(part, divided(part, trainable, elsewhere), **options)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise ConfigError(
            f"optimizer._target_={part.target} computes the loss anew within its step (closure), which the kit does not do: "
            "use another, or a strategy of your own"
        )
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer  # type: ignore[no-any-return]


def divided(part: Part, named: Sequence[Named], elsewhere: Sequence[str]) -> list[Any]:
    """The parameters as one group, or as `optimizer.groups` has them: each to the first whose pattern its name matches,
    the rest in a last one. A group may be empty where other ranks have its parameters.
    """
    if not part.aside:
        return [parameter for _, parameter in named]
    groups: list[dict[str, Any]] = []
    left = list(named)
    for number, given in enumerate(part.aside["groups"]):
        key = f"optimizer.groups[{number}]"
        patterns = _patterns(key, given)
        mine = [pair for pair in left if matches(pair[0], patterns)]
        if not mine and not any(matches(name, patterns) for name in elsewhere):
            raise ConfigError(f"{key}.match={patterns} matches no parameter; {nearest(patterns[0], dict(named))}")
        left = [pair for pair in left if not matches(pair[0], patterns)]
        options = {name: value for name, value in given.items() if name != MATCH}
        groups.append({"params": [parameter for _, parameter in mine], **options})
    return [*groups, {"params": [parameter for _, parameter in left]}] if left or elsewhere else groups


def _patterns(key: str, given: Any) -> list[str]:
    found = given.get(MATCH) if isinstance(given, dict) else None
    patterns = [found] if isinstance(found, str) else found
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"{key}={given} is not valid: give a pattern of parameters' names and their values, {{match: '*.bias', weight_decay: 0}}"
        )
    return list(patterns)


def grouped_options(part: Part) -> set[str]:
    """The keys that the config sets for the optimizer, in whatever group."""
    return {*part.values, *(name for group in part.aside.get("groups", ()) for name in group if name != MATCH)}
