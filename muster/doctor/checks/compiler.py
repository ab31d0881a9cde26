"""Check that each host with GPUs has a C compiler, which Triton needs, and that one of its ranks compiles and runs a kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from muster.doctor.base import Check, Facts, Finding, Visit, one_a_host
from muster.errors import one_line
from muster.world.group import World


class Compiler(Check):
    name = "compiler"
    slow = True

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        if world.device.type != "cuda":
            return {"has_gpu": False, "compiler": "", "error": ""}
        error = attempt(world.device) if world.environment.local_rank == 0 else ""
        return {"has_gpu": True, "compiler": find() or "", "error": error}

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found: list[Finding] = []
        for facts in one_a_host([facts for facts in ranks if facts["has_gpu"]]):
            remedy = "install gcc and the headers of libc (gcc libc6-dev), or train with compile=false"
            if not facts["compiler"]:
                found.append(Finding(f"{facts['host']}: there is no C compiler for Triton", remedy, fails=False))
            elif facts["error"]:
                found.append(
                    Finding(f"{facts['host']}: torch.compile fails: {facts['error']}", remedy, fails=False),
                )
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        return ", ".join(sorted({facts["compiler"] for facts in ranks if facts["compiler"]})) or "not checked on CPUs"


def find() -> str | None:
    """Return the C compiler that Triton would use: that of CC, else gcc or clang."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")


def attempt(device: torch.device) -> str:
    """Compile and run a small function on `device`; return the error, or nothing."""
    try:
        doubled = torch.compile(lambda values: 2 * values + 1)(torch.ones(8, device=device))
        return "" if doubled.sum().item() == 24 else "the compiled function computes another sum"
    except Exception as error:
        return one_line(error)[:300]
