"""Check that the run's folder is writable and shared by all ranks, has free space and is fast enough."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, by_value
from muster.world.group import World

MEGABYTES = 64
LEAST_FREE_GB, LEAST_SPEED = 1.0, 20.0
"""Minimum free space in GB, and minimum write speed of a checkpoint in MB/s."""


class OutputFolder(Check):
    name = "folder"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        path = Path(visit.output_dir)
        here = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
        facts: dict[str, Any] = {"path": str(path), "at": str(here), "free": shutil.disk_usage(here).free / 1e9}
        facts["writable"] = os.access(here, os.W_OK)
        facts["seen"] = _sees_token_of_rank_0(here, world)
        facts["speed"] = _speed(here) if world.environment.local_rank == 0 and not visit.quick else None
        return facts

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        first, found = ranks[0], list[Finding]()
        where = f"output_dir={first['path']}"
        if locked := by_value(ranks, "writable").get(False):
            found.append(
                Finding(
                    f"{where}: {first['at']} cannot be written to on {', '.join(locked)}",
                    "give a folder that this user may write to",
                    host=locked[0] if len(locked) == 1 else "",
                )
            )
        elif unseen := by_value(ranks, "seen").get(False):
            found.append(
                Finding(
                    f"{where} is not the folder that rank 0 writes to on {', '.join(unseen)}",
                    "give one that all nodes share: checkpoints would lack those nodes' files",
                    host=unseen[0] if len(unseen) == 1 and len({facts["host"] for facts in ranks}) > 2 else "",
                )
            )
        if first["free"] < LEAST_FREE_GB:
            found.append(Finding(f"{where}: {first['free']:.2f} GB are free", "make room, or give another output_dir"))
        slow = {
            facts["host"]: facts["speed"]
            for facts in ranks
            if facts["speed"] is not None and facts["speed"] < LEAST_SPEED
        }
        if slow:
            said = ", ".join(f"{speed:.0f} MB/s on {host}" for host, speed in slow.items())
            found.append(
                Finding(
                    f"{where} is slow to write to: {said}",
                    "checkpoints will take long: raise checkpoint.every_steps",
                    fails=False,
                )
            )
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        speeds = [facts["speed"] for facts in ranks if facts["speed"]]
        return f"{ranks[0]['at']}: {ranks[0]['free']:.0f} GB free" + (f", {min(speeds):.0f} MB/s" if speeds else "")


def _sees_token_of_rank_0(folder: Path, world: World) -> bool:
    """Collective."""
    name: str = world.broadcast(f".muster-doctor-{uuid.uuid4().hex}")
    token = folder / name
    if world.is_first:
        with contextlib.suppress(OSError):
            token.touch()
    world.sum([0.0])
    is_seen = token.exists()
    world.sum([0.0])
    if world.is_first:
        with contextlib.suppress(OSError):
            token.unlink()
    return is_seen


def _speed(folder: Path) -> float:
    """Return the write speed in MB/s of a file of `MEGABYTES` MiB, fsync included; 0 on an error."""
    path, block = folder / f".muster-doctor-{uuid.uuid4().hex}", os.urandom(1 << 20)
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(MEGABYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return MEGABYTES / (time.perf_counter() - began)
    except OSError:
        return 0.0
    finally:
        path.unlink(missing_ok=True)
