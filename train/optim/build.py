"""Build the configured optimizer over a model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from muster.errors import ConfigError, nearest, one_line
from muster.train.config.keys import Precision
from muster.train.config.parts import Part, build, locate, matches, signature
from muster.train.optim import fused

MATCH = "match"
NEEDED = ("param_groups", "state", "step", "zero_grad", "load_state_dict")
Named = tuple[str, nn.Parameter]


def build_optimizer(
    part: Part,
    named: Iterable[Named],
    *,
    precision: Precision,
    elsewhere: Sequence[str] = (),
    adapt: Callable[[torch.optim.Optimizer], set[str]] = lambda _: set(),
) -> torch.optim.Optimizer:
    """Build the configured optimizer over (name, parameter) pairs, fused where possible (fused.py).

    `optimizer.groups` divides the parameters into groups. An optimizer, or a function that makes one, whose signature has
    `named_parameters` gets the pairs instead.

    elsewhere: names of the model's parameters that only other ranks have.
    adapt: called with the built optimizer; returns the options of its groups, beside their rates, that change in training.
    Raises ConfigError: there is nothing to train, a group matches nothing, or the optimizer cannot take such a step.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to optimise")
    takes_names = "named_parameters" in signature(locate(part))
    if takes_names and part.aside:
        raise ConfigError(f"optimizer.groups: {part.target} takes named_parameters and groups them itself")
    given: list[Any] = [] if takes_names else [divided(part, trainable, elsewhere)]
    try:
        optimizer: Any = build(part, *given, **({"named_parameters": trainable} if takes_names else {}))
    except RuntimeError as error:  # torch raises it for invalid fused and foreach
        raise ConfigError(f"optimizer: {part.target} rejects its arguments: {one_line(error)[:300]}") from error
    if lacking := [name for name in NEEDED if not hasattr(optimizer, name)]:
        raise ConfigError(
            f"optimizer._target_={part.target} returns {type(optimizer).__name__}, which has no {lacking[0]}: "
            "use a torch.optim.Optimizer, or a function that returns one"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise ConfigError(
            f"optimizer._target_={part.target} computes the loss again within its step (closure), which the kit does not support: "
            "use another optimizer, or a strategy of your own"
        )
    for group in optimizer.param_groups:
        if group.get("lr") is not None:  # some optimizers have no rate, or compute it
            group.setdefault("initial_lr", group["lr"])
    fused.choose(optimizer, part, precision=precision, changing=adapt(optimizer))
    return optimizer  # type: ignore[no-any-return]


def divided(part: Part, named: Sequence[Named], elsewhere: Sequence[str]) -> list[Any]:
    """Return the parameters as one group, or in the groups of `optimizer.groups`.

    A parameter joins the first group whose pattern matches; the rest form a last group. A group may be empty if other ranks have its parameters.
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
    """Return the names of the options that the config sets for the optimizer, in any group."""
    return {*part.values, *(name for group in part.aside.get("groups", ()) for name in group if name != MATCH)}
