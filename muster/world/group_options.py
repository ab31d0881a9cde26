"""Settings from which a job's ranks form their process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupOptions:
    """Settings of a process group.

    device: `auto`, `cpu` or `cuda`; `auto` is CUDA if the host has a device.
    gpus: the devices of local ranks 0, 1, ...; None uses all, in order.
    backend: `auto`, `gloo` or `nccl`; `auto` follows the device.
    timeout_s: seconds after which a rank that has stood still is ended.
    start_timeout_s: seconds within which all ranks must arrive.
    shared_memory: whether CPU ranks of one host all-reduce in shared memory; otherwise they use gloo.
    hierarchical: `never`, `auto` or `always`: whether sums in one order at any number of ranks go host by host.
    alike: the flat values that every rank must have in common to train together; None compares none.
    """

    device: str = "auto"
    gpus: Sequence[int] | None = None
    backend: str = "auto"
    timeout_s: float = 300.0
    start_timeout_s: float = 60.0
    shared_memory: bool = True
    hierarchical: str = "never"
    alike: Mapping[str, Any] | None = None
