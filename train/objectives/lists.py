"""Align the list states of metrics (torchmetrics' curves) on all ranks before they are gathered.

torchmetrics gathers tensors of the same dtype and number of dimensions. A rank without samples has an empty list, which
has neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from muster.errors import ConfigError
from muster.world.group import World


def fill_lists(metrics: Mapping[str, Any], world: World) -> None:
    """Give ranks without samples empty tensors like those of other ranks. Collective.

    Raises ConfigError: a metric keeps its samples apart, and ranks have different numbers of them.
    """
    if world.size == 1:
        return
    lists = list(_lists(metrics))
    if not lists:
        return
    for _, metric, attribute, joined in lists:
        if joined and (values := getattr(metric, attribute)):
            setattr(
                metric, attribute, [torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])]
            )
    everybody = world.gather([_look(getattr(metric, attribute)) for _, metric, attribute, _ in lists])
    for (name, metric, attribute, joined), looks in zip(lists, zip(*everybody, strict=True), strict=True):
        like = next((look for look in looks if look["length"]), None)
        if not joined and len({look["length"] for look in looks}) > 1:
            raise ConfigError(
                f"metrics.{name} gathers sample by sample, and the ranks have different numbers of them: "
                "use batches that are equally large on all ranks, or evaluate with one rank: muster evaluate"
            )
        if like and not getattr(metric, attribute):
            dtype = getattr(torch, like["dtype"])
            setattr(metric, attribute, [torch.empty((0, *like["sizes"]), dtype=dtype, device=world.device)])


def _lists(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield (name, metric, attribute, is_joined) of each list state; a joined one is concatenated into one tensor."""
    for name, outer in metrics.items():
        for metric in outer.modules() if isinstance(outer, nn.Module) else ():
            for attribute, reduction in getattr(metric, "_reductions", {}).items():
                if isinstance(getattr(metric, attribute), list):
                    yield name, metric, attribute, getattr(reduction, "__name__", "") == "dim_zero_cat"


def _look(values: list[Any]) -> dict[str, Any]:
    first = values[0] if values else torch.empty(0)
    return {"length": len(values), "dtype": str(first.dtype).removeprefix("torch."), "sizes": list(first.shape[1:])}
