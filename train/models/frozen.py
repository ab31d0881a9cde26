"""Frozen modules that stay in evaluation mode while the others train: their statistics do not move, and they draw nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

STAYS = "_stays_in_evaluation_mode"
"""Attribute of a module that stays in it, and of all modules within, of which a strategy may keep some."""


def keep_in_evaluation(model: nn.Module, frozen: Iterable[str]) -> list[str]:
    """Mark the modules whose parameters are all frozen and that train otherwise than they evaluate; return their names.

    A module within another one that is marked is not named. `frozen`: names of the parameters that the config has frozen.
    """
    names = [*_outermost(model, {*frozen}, "")]
    mark(model, names)
    return names


def mark(model: nn.Module, names: Iterable[str]) -> None:
    """Let the modules of these names, and all within them, stay in evaluation mode."""
    for name in names:
        for each in model.get_submodule(name).modules():
            each.__dict__[STAYS] = True


def marked(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if STAYS in each.__dict__]


def set_mode(model: nn.Module, mode: bool) -> None:
    model.train(mode)
    for each in model.modules() if mode else ():
        if each.training and STAYS in each.__dict__:
            each.train(False)


def needs_mode(module: nn.Module, mode: bool) -> bool:
    """Return True if a module in it is not in its mode, or its `train` is not torch's, and may do more than set it.

    In every step, so without `modules()`, which takes as long as a small layer.
    """
    mode = mode and STAYS not in module.__dict__
    if module.training is not mode or type(module).train is not nn.Module.train or "train" in module.__dict__:
        return True
    return any(needs_mode(each, mode) for each in module._modules.values() if each is not None)


def _outermost(module: nn.Module, frozen: set[str], path: str) -> Iterator[str]:
    for name, child in module.named_children():
        own = f"{path}{name}"
        parameters = dict(child.named_parameters(prefix=own))
        are_frozen = not any(each.requires_grad for each in parameters.values()) and bool(frozen & parameters.keys())
        if not are_frozen:
            yield from _outermost(child, frozen, f"{own}.")
        elif any(map(_differs, child.modules())):
            yield own


def _differs(module: nn.Module) -> bool:
    """Return True if a module, by its class or its `dropout`, computes something else in training than in evaluation."""
    rate = getattr(module, "dropout", None)  # of attention and recurrent layers
    by_name = any(word in type(module).__name__.lower() for word in ("drop", "stochasticdepth"))
    return by_name or isinstance(module, _NormBase | _DropoutNd) or (isinstance(rate, float) and rate > 0)
