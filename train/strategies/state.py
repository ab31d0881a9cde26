"""State of a model and its optimizer under flat names, which are the same on every rank and at every world size."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from muster.checkpoint.digests import differing
from muster.checkpoint.optimizer_state import empty_states, flat_state, load_nested, nested_state
from muster.checkpoint.plain_values import dumps_plain
from muster.checkpoint.trained import EXTRA, SavedTensor, extra_of
from muster.errors import ConfigError
from muster.world.group import World

MODEL = "model/"
GROUPS, OTHERS = "optimizer/groups", "optimizer/others"
ALWAYS_CONFIGURED = {"params", "param_names", "lr", "initial_lr", "fused", "foreach"}
Groups = list[list[str]]
"""Parameter names of each group of an optimizer."""


def of_model(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {f"model/{name}": value for name, value in weights.items()}


def check_extra(weights: Mapping[str, Any], world: World) -> None:
    """Raise ConfigError for extra state that cannot be loaded with `weights_only=True`, or differs between the ranks. Collective."""
    extra = {f"{name.removesuffix(EXTRA)}get_extra_state()": value for name, value in extra_of(weights).items()}
    for name, value in extra.items():
        dumps_plain(value, name, for_torch=True)
    if extra and (name := min(differing(extra, world), default="")):
        raise ConfigError(
            f"{name} of the model differs between the ranks, and a checkpoint has one value of it: keep what depends on a rank or its samples in a buffer"
        )


def refuse_extra_state(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for extra state in the model, for a `strategy` in which no rank both trains and holds the full model."""
    if name := next(iter(extra_of(model.state_dict())), ""):
        raise ConfigError(
            f"strategy={strategy} carries parameters and buffers from rank to rank, and {name} is of get_extra_state: "
            "keep it in a buffer, or use strategy=ddp"
        )


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Groups:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def of_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, everywhere: Groups | None = None
) -> dict[str, Any]:
    """`optimizer/<parameter>/<value>` for the optimizer's state, and its groups' options with parameter names.

    State that belongs to no parameter but has a name is stored as one plain value.
    everywhere: the groups of the full model, if other ranks hold some of its parameters.
    Raises ConfigError: the optimizer has state that belongs neither to a parameter nor to a name.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    flat = flat_state(optimizer, names, "optimizer")
    if others := {key: value for key, value in optimizer.state.items() if key not in names}:
        if strange := next((key for key in others if not isinstance(key, str)), None):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps state by {type(strange).__name__}, which no checkpoint can name: "
                "keep it by parameter or by a name"
            )
        flat[OTHERS] = {key: [value, _device(value)] for key, value in others.items()}
    groups = zip(optimizer.param_groups, everywhere or groups_of(optimizer, model), strict=True)
    return {**flat, GROUPS: [{**group, "params": params} for group, params in groups]}


def targets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, SavedTensor],
    *,
    elsewhere: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Tensors in this rank's layout to read the `saved` ones into: the model's own, and new ones for the optimizer.

    elsewhere: sizes of the state entries that only other ranks hold: compared here, but not read.
    Raises ConfigError: the model and the saved model differ in names or sizes.
    """
    here = of_model({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})
    there = {name for name in saved if name.startswith("model/")}
    sizes = {**{name: tensor.shape for name, tensor in here.items()}, **of_model(elsewhere)}
    for name in sorted(sizes.keys() ^ there):
        where = "has no" if name in sizes else "has a"
        raise ConfigError(f"the checkpoint {where} {name[6:]}, unlike this model: it does not fit, give the same model")
    for name, size in sizes.items():
        if size != saved[name].size:
            both = f"{list(saved[name].size)} in the checkpoint and {list(size)} in this model"
            raise ConfigError(f"the checkpoint does not fit this model: {name[6:]} is {both}; give the same model")
    return here | dict(empty_states(saved, dict(model.named_parameters()), "optimizer"))


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    configured: frozenset[str],
    everywhere: Groups | None = None,
) -> None:
    """Load a flat state; its groups may differ from the optimizer's groups, or be in a different order.

    In the optimizer's groups, the `configured` options keep the values of the config. All others get the values of the saved groups of the
    same parameters. everywhere: as for `of_optimizer`. Raises ConfigError: the state does not fit.
    """
    decides = configured | ALWAYS_CONFIGURED
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        model.load_state_dict({name[6:]: value for name, value in state.items() if name.startswith("model/")})
        kept = _kept(state[GROUPS], everywhere or groups_of(optimizer, model), decides)
        groups = [{**before, **saved} for before, saved in zip(options, kept, strict=True)]
        load_nested(optimizer, _nested(state, model, optimizer, groups))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the checkpoint does not fit this model and optimizer: {error}") from error
    for group, before in zip(optimizer.param_groups, options, strict=True):
        group.update({key: value for key, value in before.items() if key in decides or key not in group})


def _device(value: Any) -> str:
    return next((leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), "cpu")


def _kept(saved: list[dict[str, Any]], groups: Groups, decides: Set[str]) -> list[dict[str, Any]]:
    """The saved options for each of `groups`, without the keys that the config `decides`."""
    group_of = {name: group for group in saved for name in group["params"]}
    names = {name for group in groups for name in group}
    if group_of.keys() != names:
        raise ValueError(f"its optimizer had {len(group_of)} parameters, or others, and this one has {len(names)}")
    return [_agreed({name: group_of[name] for name in group}, decides) for group in groups]


def _agreed(group_of: Mapping[str, dict[str, Any]], decides: Set[str]) -> dict[str, Any]:
    """The options that the saved groups of one present group's parameters share. Raises ConfigError if they differ."""
    first_name, first = next(iter(group_of.items()), ("", {}))
    for name, group in group_of.items():
        for key in sorted((first.keys() | group.keys()) - decides):
            if not _same(first.get(key), group.get(key)):
                raise ConfigError(
                    f"in the checkpoint {first_name} has {key}={first.get(key)} and {name} has {key}={group.get(key)}, "
                    f"and now they are in one group: set optimizer.{key}, or give optimizer.groups that keep them apart"
                )
    return {key: value for key, value in first.items() if key not in decides}


def _same(one: Any, other: Any) -> bool:
    (ones, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind == other_kind and all(_equal(*pair) for pair in zip(ones, others, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other.to(one.device)).all())
    is_same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return type(one) is type(other) and bool(is_same)


def _nested(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The optimizer's state dict, with torch's parameter indices: consecutive over all `groups` in order."""
    values = {
        name.removeprefix("optimizer/"): value
        for name, value in state.items()
        if name.startswith("optimizer/") and name not in (GROUPS, OTHERS)
    }
    nested = nested_state(values, groups_of(optimizer, model), groups)
    for key, (value, device) in state.get(OTHERS, {}).items():
        near = next(model.parameters()).device if device != "cpu" else torch.device("cpu")
        nested["state"][key] = tree_map_only(Tensor, partial(torch.Tensor.to, device=near), value)
    return nested
