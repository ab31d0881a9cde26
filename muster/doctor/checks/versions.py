"""Check that all nodes have the same software versions, GPUs and machine type."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from muster.doctor.base import Check, Facts, Finding, Visit, by_value
from muster.world.group import World

MUST = ("torch", "nccl", "kit")
"""Software whose versions must be equal on all ranks for training to work."""


class Versions(Check):
    name = "versions"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        cuda = torch.cuda.is_available()
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",  # type: ignore[no-untyped-call]
            "gpu": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "",
            "kit": installed("torch-muster"),
            "machine": platform.machine(),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found = []
        for name in self.names(ranks):
            each = by_value(ranks, name)
            if len(each) > 1:
                said = "; ".join(f"{value or 'none'} on {', '.join(hosts)}" for value, hosts in each.items())
                found.append(Finding(f"{name} differs: {said}", "install the same everywhere", fails=name in MUST))
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        return ", ".join(f"{name} {ranks[0][name]}" for name in self.names(ranks) if ranks[0][name])

    def names(self, ranks: Sequence[Facts]) -> list[str]:
        return [name for name in ranks[0] if name not in ("rank", "host", "local_rank")]


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "checkout"
