"""NCCL's flight recorder: the last collectives of each process group, kept in memory and written out after a hang.

Source: torch's tutorial "Flight Recorder for Debugging Stuck Jobs"; `torchfrtrace FOLDER` reads what is written here.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from muster.world.store_keys import within

ENTRIES = "2000"
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The number of entries, by its name and by that before torch 2.13, of which later versions warn."""
WRITE_S = 5.0


def switch_on() -> None:
    """Have process groups that are made from now on record, unless the environment says how much they record."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ[variable(torch.__version__)] = ENTRIES


def variable(version: str) -> str:
    major, minor = map(int, version.split(".")[:2])
    return VARIABLES[(major, minor) < (2, 13)]


def write(folder: Path, *, attempt: str, rank: int) -> str | None:
    """Write this rank's record into a folder of the attempt in `folder`; return that folder's name, or None if it fails.

    It takes `WRITE_S` at most, because the folder may be lost, too.
    """
    name = f"flight-recorder-{attempt[:8]}"

    def dump() -> str:
        found: bytes = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"rank_{rank}").write_bytes(found)
        return name

    said: str | None = within(WRITE_S, dump)
    return said
