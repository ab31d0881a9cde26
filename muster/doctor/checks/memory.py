"""Check that each host has enough memory, /dev/shm and file descriptors for its ranks."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.doctor.base import Check, Facts, Finding, Visit, one_a_host
from muster.world.group import World

GIB = 2**30
LEAST, LEAST_SHARED = 1.0, 0.25
"""Minimum GiB per rank of free memory, and of /dev/shm if the loader has workers."""
LEAST_FILES = 1024


class Memory(Check):
    name = "memory"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        shared = Path("/dev/shm")
        return {
            "free": free() / GIB,
            "shared": shutil.disk_usage(shared).free / GIB if shared.is_dir() else 0.0,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "ranks": world.environment.local_world_size,
            "workers": visit.workers,
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found: list[Finding] = []
        for facts in one_a_host(ranks):
            host, number = facts["host"], facts["ranks"]
            if facts["free"] < LEAST * number:
                found.append(
                    Finding(
                        f"{host}: {facts['free']:.1f} GiB of memory are free for {number} ranks",
                        "a rank takes about 1 GiB before any model",
                        host=facts["host"],
                    )
                )
            if facts["workers"] and facts["shared"] < LEAST_SHARED * number:
                found.append(
                    Finding(
                        f"{host}: {facts['shared']:.2f} GiB of /dev/shm are free, which loader workers need for batches",
                        "docker --shm-size=8g, a Kubernetes emptyDir with medium: Memory, or loader.num_workers=0",
                        host=facts["host"],
                    )
                )
            if facts["files"] < LEAST_FILES:
                found.append(
                    Finding(
                        f"{host}: at most {facts['files']} file descriptors",
                        f"ulimit -n {LEAST_FILES} or more",
                        fails=False,
                    )
                )
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        hosts = one_a_host(ranks)
        return f"{min(f['free'] for f in hosts):.1f} GiB free, /dev/shm {min(f['shared'] for f in hosts):.1f} GiB, {min(f['files'] for f in hosts)} files"


def free() -> float:
    """Return the available memory in bytes: of the machine, or the rest of its cgroup's limit if that is less."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available = float(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)
