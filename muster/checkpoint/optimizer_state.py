"""The state of optimizers under flat names, PREFIX/PARAMETER/KEY, and as it is read from checkpoints and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from muster.checkpoint.trained import SavedTensor
from muster.errors import ConfigError

STEP = "step"
"""Key of torch's count of steps of a parameter."""


def flat_state(optimizer: Optimizer, names: Mapping[Any, str], prefix: str) -> dict[str, Any]:
    """Return `prefix/PARAMETER/KEY` for the state of each parameter that has a name in `names`.

    Raises ConfigError: a key is no text that can be told from a parameter's name.
    """
    for key in {key for parameter, values in optimizer.state.items() if parameter in names for key in values}:
        if not isinstance(key, str) or "/" in key:
            raise ConfigError(
                f"{prefix} keeps {key!r} of each parameter, which no checkpoint can name: give a text without /"
            )
    return {
        f"{prefix}/{names[parameter]}/{key}": value
        for parameter, values in optimizer.state.items()
        if parameter in names
        for key, value in values.items()
    }


def empty_states(
    saved: Mapping[str, SavedTensor], parameters: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the `saved` names below `prefix` that are of the state of one of the `parameters`, and tensors to read them into."""
    for name, facts in saved.items():
        kind, _, rest = name.partition("/")
        parameter, _, key = rest.rpartition("/")
        if kind == prefix and parameter in parameters:
            yield name, empty_state(key, facts, parameters[parameter])


def nested_state(
    values: Mapping[str, Any], names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state dict of an optimizer with these `groups`, and in each the parameters of these `names`.

    values: PARAMETER/KEY -> value; those of parameters that are not in `names` are left out: another rank holds them.
    """
    index = {name: number for number, name in enumerate(name for of_group in names for name in of_group)}
    state: dict[Any, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, key = path.rpartition("/")
        if name in index:
            state.setdefault(index[name], {})[key] = value
    numbered = [
        {**group, "params": [index[name] for name in of_group]} for group, of_group in zip(groups, names, strict=True)
    ]
    return {"state": state, "param_groups": numbered}


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


def load_nested(optimizer: Optimizer, nested: Mapping[str, Any]) -> None:
    """Load a state dict with its dtypes: torch casts the state of a parameter to the dtype of that.

    Entries under a text belong to no parameter, and are never cast. Lists, dicts, arrays and texts are set afterwards: torch casts
    the tensors within them, too, and gives to the type of each iterable a generator of its items, from which no text is made. The groups
    stay the same objects, which torch replaces: a loop may hold one.
    """
    groups = [*optimizer.param_groups]
    apart = {
        index: {name: value for name, value in values.items() if _is_other(value)}
        for index, values in nested["state"].items()
        if not isinstance(index, str)
    }
    kept = {
        index: {name: value for name, value in values.items() if name not in apart[index]} if index in apart else values
        for index, values in nested["state"].items()
    }
    optimizer.load_state_dict({**nested, "state": kept})
    for number, group in enumerate(groups):
        loaded = {**optimizer.param_groups[number]}
        group.clear()
        group |= loaded
        optimizer.param_groups[number] = group
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, others in apart.items():
        loaded = optimizer.state[parameters[index]]
        for name, value in kept[index].items():
            if isinstance(value, Tensor) and name in loaded and loaded[name].dtype != value.dtype:
                loaded[name] = value.detach().to(loaded[name].device)
        near = partial(Tensor.to, device=parameters[index].device)
        loaded |= {name: tree_map_only(Tensor, near, value) for name, value in others.items()}


def _is_other(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, Tensor)
