"""Avoid the import of torch._dynamo when nothing is compiled: the import takes more than a second, with sympy.

torch's optimizers and DDP import torch._dynamo to exclude themselves from compilation, which is not needed here. If a
later torch does this differently, the only effect is that the import happens again.
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
    """Make torch's optimizers and DDP call their methods without torch._dynamo's wrappers, unless it is already imported."""
    if DYNAMO in sys.modules:
        return
    for owner in (Optimizer, DistributedDataParallel):
        for method in vars(owner).values():
            inner = innermost(method)
            if inner is not method:
                inner.__dynamo_disable = inner  # torch._compile._disable_dynamo reads it to see if it is done
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if getattr(step, "__code__", SimpleNamespace(co_name="")).co_name == "_use_grad":
            kind.step = without_breaks(innermost(step))


def innermost(method: Any) -> Any:
    while inner := getattr(method, "__wrapped__", None):
        method = inner
    return method


def without_breaks(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch.optim.optimizer._use_grad_for_differentiable without its breaks in dynamo's graph."""

    @functools.wraps(step)
    def without(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return without


@contextlib.contextmanager
def answered_for_dynamo() -> Iterator[None]:
    """Replace torch._dynamo while DDP is created: DDP reads its mode for compiled models, here the default."""
    if DYNAMO in sys.modules:
        yield
        return
    package: Any = torch
    package._dynamo = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    try:
        yield
    finally:
        del package._dynamo
