"""A model's and its optimizer's state under flat names that mean the same on every rank and at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train.errors import ConfigError
from train.strategies.base import SavedTensor

ALWAYS_CONFIGURED = {"lr", "initial_lr", "fused", "foreach"}


def of_model(weights: Mapping[str, Any]) -> dict[str, Any]:
    """`model/<name>` for each entry of a state dict."""
    return {f"model/{name}": value for name, value in weights.items()}


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """`optimizer/<parameter>/<value>`, and the groups' options with their parameters by name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    flat: dict[str, Any] = {
        f"optimizer/{names[parameter]}/{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {**flat, "optimizer/groups": groups}


def targets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, SavedTensor],
    *,
    elsewhere: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Tensors laid out as the model's own for what was `saved`: the model's themselves, new ones for the optimizer's.

    `elsewhere` are the entries of the model's state that other ranks have: they are compared, and not read here.

    Raises:
        ConfigError: the model and the saved one differ in names or sizes.
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
    parameters = dict(model.named_parameters())
    for name, facts in saved.items():
        kind, _, rest = name.partition("/")
        parameter = parameters.get(rest.rpartition("/")[0]) if kind == "optimizer" else None
        if parameter is not None:
            here[name] = _empty(facts, parameter)
    return here


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    configured: frozenset[str],
    elsewhere: Mapping[str, torch.Size],
) -> None:
    """Take up a flat state. In the optimizer's groups the keys that are `configured` stay as the config has them.

    Raises:
        ConfigError: it does not fit.
    """
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        model.load_state_dict({name[6:]: value for name, value in state.items() if name.startswith("model/")})
        optimizer.load_state_dict(_nested(state, model, optimizer, elsewhere))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the checkpoint does not fit this model and optimizer: {error}") from error
    decides = configured | ALWAYS_CONFIGURED
    for group, before in zip(optimizer.param_groups, options, strict=True):
        group.update({key: value for key, value in before.items() if key in decides or key not in group})


def _empty(facts: SavedTensor, like: Tensor) -> Tensor:
    """In the layout of its parameter where it has its parameter's shape, else whole."""
    if facts.size == like.shape:
        return torch.empty_like(like, dtype=facts.dtype, requires_grad=False)
    return torch.empty(facts.size, dtype=facts.dtype, device=like.device)


def _nested(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, elsewhere: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """The optimizer's state dict by index, as torch numbers it: through all groups in their order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = state["optimizer/groups"]
    groups = [{**group, "params": [name for name in group["params"] if name not in elsewhere]} for group in groups]
    saved = [name for group in groups for name in group["params"]]
    if sorted(saved) != sorted(order):
        raise ValueError(f"its optimizer had {len(saved)} parameters, or others, and this one has {len(order)}")
    index = {name: number for number, name in enumerate(order)}
    values: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer/") and key != "optimizer/groups":
            name, _, what = key.removeprefix("optimizer/").rpartition("/")
            values.setdefault(index[name], {})[what] = value
    return {
        "state": values,
        "param_groups": [{**group, "params": sorted(index[name] for name in group["params"])} for group in groups],
    }
