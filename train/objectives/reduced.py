"""Find metrics whose value is of their own rank's samples alone, because they add up nothing over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from muster.code_location import defined, name_of
from muster.errors import ConfigError
from muster.train.objectives.samples import few
from muster.train.objectives.trial import Trial
from muster.train.objectives.undeclared import equal, undeclared

FEW = 2
"""Samples that are kept of a metric's first micro-batch."""


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether torch.distributed communicates values in the context: `were_seen`. A barrier has none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.were_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_seen |= "c10d" in func.namespace and "barrier" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def adds_up(metric: Any) -> bool:
    """Return whether torchmetrics adds the metric's declared states up over the ranks."""
    inner = metric.modules() if isinstance(metric, nn.Module) else [getattr(metric, "metric", None)]
    return any(getattr(each, "_reductions", None) and getattr(each, "sync_on_compute", True) for each in inner)


def depends(metric: Any, samples: tuple[Any, Any] | None) -> bool:
    """Return whether the value of `metric` is seen to change with its samples; False if it cannot be tried.

    The metric must not communicate. A learning rate, for example, is the same on all ranks without depending on samples.
    """

    def value(times: int, most: int) -> str:
        each = copy.deepcopy(metric)
        each.reset()
        for _ in range(times):
            each.update(*few(samples, most))
        return repr(pytree.tree_map(float, each.compute()))

    try:
        return samples is not None and len({value(1, FEW), value(2, FEW), value(1, 1)}) > 1
    except Exception:
        return False


def update_watched(metric: Any, update: Callable[[], object], *, name: str, trial: Trial | None = None) -> None:
    """Call `update`, which updates `metric` for the first time.

    Raises ConfigError: it counts something that a user's own torchmetrics class has not declared by `add_state`, so that neither ranks nor
    slices put it together (without a trial: it changed a number or a tensor, or a list's length); or it made metrics, which other ranks or
    slices may not have.
    """
    before, parts = undeclared(metric), _parts(metric)
    update()
    after = undeclared(metric)
    if _parts(metric) != parts:
        raise ConfigError(
            f"metrics.{name}: {name_of(metric)} makes metrics while it is updated{defined(metric, 'update')}: other ranks or "
            "slices, with other samples, make others; make all of them in its constructor"
        )
    changed = [key for key, value in after.items() if key in before and _has_counted(before[key], value)]
    if counts := changed if trial is None else trial.counts:
        raise ConfigError(
            f"metrics.{name}: {name_of(metric)} keeps {counts[0]} without add_state{defined(metric, 'update')}: it is not "
            f"put together over ranks or slices; write self.add_state('{counts[0]}', torch.tensor(0.0), "
            "dist_reduce_fx='sum') in its constructor"
        )


def _has_counted(before: Any, after: Any) -> bool:
    if isinstance(before, list) and isinstance(after, list):
        return len(before) != len(after)
    return isinstance(before, int | float | Tensor) and not equal(before, after)


def _parts(metric: Any) -> int:
    return sum(hasattr(each, "sync") for each in metric.modules()) if isinstance(metric, nn.Module) else 0
