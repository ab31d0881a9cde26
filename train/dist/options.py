"""How a job's ranks form their process group: the settings that dist/ takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupOptions:
    """One process group.

    device: `auto`, `cpu` or `cuda`; `auto` is CUDA where there is a device.
    gpus: the devices of local ranks 0, 1, ...; None: all, in order.
    backend: `auto`, `gloo` or `nccl`; `auto` is by device.
    timeout_s: seconds after which a rank that has stood still is ended.
    start_timeout_s: seconds within which all ranks must have arrived.
    shared_memory: whether CPU ranks of one host add up in memory; otherwise they do by gloo.
    alike: the flat values that every rank must have in common to train together; None: nothing is compared.
    """

    device: str = "auto"
    gpus: Sequence[int] | None = None
    backend: str = "auto"
    timeout_s: float = 300.0
    start_timeout_s: float = 60.0
    shared_memory: bool = True
    alike: Mapping[str, Any] | None = None
