"""Training without torch._dynamo where nothing is compiled: its import takes more than a second, sympy and all.

Torch's optimizers and DDP import it to have themselves left out of what is compiled, which nobody does here. What of
this a later torch does in another way takes that second again, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

DYNAMO = "torch._dynamo"


def stay_eager() -> None:
    """From here on torch's optimizers and DDP call their own methods as they are, unless something is compiled already."""
    if DYNAMO in sys.modules:
        return
    for owner in (Optimizer, DistributedDataParallel):
        for method in vars(owner).values():
            inner = innermost(method)
            if inner is not method:
                inner.__dynamo_disable = inner  # where torch._compile._disable_dynamo looks whether it is done
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if getattr(step, "__code__", SimpleNamespace(co_name="")).co_name == "_use_grad":
            kind.step = without_breaks(innermost(step))


def innermost(method: Any) -> Any:
    """What decorators have been wrapped around."""
    while inner := getattr(method, "__wrapped__", None):
        method = inner
    return method


def without_breaks(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch.optim.optimizer._use_grad_for_differentiable, less its breaks in dynamo's graph."""

    @functools.wraps(step)
    def without(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return without


@contextlib.contextmanager
def answered_for_dynamo() -> Iterator[None]:
    """DDP asks it at its making how compiled models are to be treated; this is its default."""
    if DYNAMO in sys.modules:
        yield
        return
    package: Any = torch
    package._dynamo = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    try:
        yield
    finally:
        del package._dynamo
