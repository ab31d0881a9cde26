"""Prepare a model for a run: load initial weights and freeze parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from muster.checkpoint.trained import COMPILED, EXTRA, plain
from muster.errors import ConfigError, nearest
from muster.train.config.parts import matches
from muster.train.models.frozen import keep_in_evaluation

MOST_PATTERNS = 8
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def prepared(
    build: Callable[[], nn.Module],
    *,
    weights: Mapping[str, Any] | None,
    ignore: Sequence[str] | None,
    freeze: Sequence[str],
    in_evaluation: list[str] | None = None,
) -> nn.Module:
    """Build the model, load `weights` except names that match `ignore`, and freeze parameters that match `freeze`.

    `ignore`: None if the weights are a whole run's own, which must all fit. `in_evaluation`: gets the names of the frozen modules
    that stay in evaluation mode; None: they train as the others.
    Raises ConfigError: weights and model differ in other names or in shapes, a pattern of `freeze` matches nothing, or a parameter
    has no size yet (a lazy layer), or is sparse.
    """
    model = compiled_in_place(build())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"the model's {name} has no size before the first batch (a lazy layer), but must be sharded before it: "
                "give the layer its sizes; a model's parameter input_shape gets that of a sample"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"the model's {name} is sparse, which no checkpoint holds: keep it in an attribute that is no buffer"
            )
    if weights is not None:
        take(model, weights, ignore)
    names = dict(model.named_parameters())
    for pattern in freeze:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(f"freeze={pattern} matches no parameter; {nearest(pattern, names)}")
    for name, parameter in names.items():
        if matches(name, freeze):
            parameter.requires_grad_(False)
    if in_evaluation is not None:
        in_evaluation[:] = keep_in_evaluation(model, [name for name in names if matches(name, freeze)])
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Return the model with each wrapper of torch.compile replaced by its module, compiled as by `nn.Module.compile`.

    The wrapper puts `_orig_mod.` into the names of weights, which then are not those of the model without it. One with hooks of its
    own stays.
    """
    for module in [*model.modules()]:
        for name, child in module._modules.items():
            module._modules[name] = _unwrapped(child)
    whole: nn.Module = _unwrapped(model)
    return whole


def _unwrapped(module: Any) -> Any:
    while type(module).__name__ == COMPILED and not any(vars(module).get(each) for each in HOOKS):
        wrapper, module = module, module._orig_mod
        module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)
    return module


def take(model: nn.Module, weights: Mapping[str, Any], ignore: Sequence[str] | None) -> None:
    """Load `weights`, a state dict, into the model, except names that match `ignore`.

    Raises ConfigError: a name that does not match `ignore` is missing on either side, or differs in shape.
    """
    weights = {plain(name): value for name, value in weights.items()}
    wanted = {name: value for name, value in weights.items() if not matches(name, ignore or ())}
    _make_room(model, wanted)
    state = {plain(name): (name, value) for name, value in model.state_dict().items()}
    own = {name: value for name, (_, value) in state.items() if isinstance(value, Tensor)}
    there = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    fits = {name: value for name, value in there.items() if name in own and own[name].shape == value.shape}
    left = list(dict.fromkeys(n for n in (*own, *there) if n not in fits and not matches(n, ignore or ())))
    if left:
        name = left[0]
        if name in own and name in there:
            what = f"{name} is {list(there[name].shape)} there and {list(own[name].shape)} in this model"
        else:
            what = f"{name} is {'missing there' if name in own else 'not in this model'}"
        more = f" ({len(left)} such names)" if len(left) > 1 else ""
        patterns = ",".join(_patterns(left))
        if ignore is None:
            raise ConfigError(
                f"the weights do not fit the model: {what}{more}, in {patterns.replace(',', ', ')}: they belong to another model; give the class and its "
                "values as they were when it was trained (model.key=value)"
            )
        raise ConfigError(
            f"init_from does not fit: {what}{more}; do not load them with init_ignore=[{','.join([*ignore, patterns])}]"
        )
    for name, value in wanted.items():
        if name in state and name.rpartition(".")[2] == EXTRA:
            model.get_submodule(state[name][0].rpartition(".")[0]).set_extra_state(value)
        elif name in fits:
            with torch.no_grad():
                own[name].copy_(value)


def _make_room(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Allocate buffers that are None until the model assigns them, with their shapes in `weights`."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            value = weights.get(plain(f"{path}.{key}" if path else key))
            if buffer is None and isinstance(value, Tensor):
                module._buffers[key] = torch.empty_like(value, device="cpu")


def _patterns(names: Sequence[str]) -> list[str]:
    """Return the modules that hold the names; if there are many, the outermost ones."""
    modules = [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]
    if len(modules) > MOST_PATTERNS:
        modules = [*dict.fromkeys(name.partition(".")[0] for name in names)]
    return [each for each in modules if not any(each.startswith(f"{other}.") for other in modules)]
