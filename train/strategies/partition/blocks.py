"""The blocks of a model: its repeated modules, between which it can be cut."""

from __future__ import annotations

from torch import nn


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost elements of the model's ModuleLists and Sequentials by name, in order.

    A ModuleList or Sequential that is an element itself is replaced by its own elements.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and not inside and isinstance(parent, nn.ModuleList | nn.Sequential):
            if not isinstance(module, nn.ModuleList | nn.Sequential):
                found[name] = module
    return found
