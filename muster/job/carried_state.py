"""Notices what a loop carries from step to step in a variable: what a model gives in one step and takes in a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

STEPS = 4
"""The steps of an attempt that are looked at."""


class CarriedState:
    """Looks at the inputs and outputs of modules in an attempt's first steps, as at a recurrent model's hidden state.

    A tensor is known again by its memory, which `detach()` shares. What a module has passed on from its inputs, its parameters
    or its buffers is not its own to give.

    Args:
        modules: by name.
        step: returns the number of steps done.
    """

    def __init__(self, modules: Mapping[str, nn.Module], step: Callable[[], int]):
        self.found = ""
        """The name of a module that has taken what one gave in an earlier step; empty as long as none has."""
        self._names = {id(module): name for name, module in modules.items()}
        self._step, self._given = step, dict[StorageWeakRef, int]()
        self._last = step() + STEPS
        self._handles = [each.register_forward_pre_hook(self._take, with_kwargs=True) for each in modules.values()]
        self._handles += [each.register_forward_hook(self._give, with_kwargs=True) for each in modules.values()]

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._given = [], {}

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # what is traced knows no memory
        now = self._step()
        if any(self._given.get(each, now) < now for each in _memory((args, kwargs))):
            self.found = self._names[id(module)]
        if self.found or now >= self._last:
            self.close()

    def _give(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or not self._handles:
            return
        own = {*_memory((args, kwargs, [*module.parameters()], [*module.buffers()]))}
        self._given |= {each: self._step() for each in _memory(outputs) if each not in own}


def _memory(values: Any) -> Iterator[StorageWeakRef]:
    for each in pytree.tree_leaves(values):
        if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided:
            yield StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
