"""One machine: tests and benchmarks start several agents on it; `cluster=local` and a shell with NPROC set start one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from muster.launcher import compose
from muster.launcher.spec import SCRIPT_RESTARTS, Dynamic, Spec
from muster.launcher.variables import whole

ADDRESS = "127.0.0.1"
TIMINGS = replace(compose.TIMINGS, last_call_timeout=1)  # nodes start in the same second
GRACE_S = 40


def spec(
    nnodes: str, *, port: int, id: str, is_host: bool, nproc: int = 1, max_restarts: int = 100, threads: int = 1
) -> Spec:
    """Port 0 is any free port, for a world of one node."""
    return Spec(
        nnodes=nnodes,
        nproc=str(nproc),
        max_restarts=max_restarts,
        rendezvous=Dynamic(endpoint=f"{ADDRESS}:{port}", id=id, is_host=is_host, timings=TIMINGS),
        local_addr=ADDRESS,
        grace_s=GRACE_S,
        threads=threads,
    )


def this_machine(env: Mapping[str, str]) -> Spec:
    """`NPROC` processes on this machine alone. Raises ConfigError."""
    nproc = whole(env, "NPROC", default=1, least=1)
    threads = whole(env, "OMP_NUM_THREADS", default=max(1, (os.cpu_count() or 1) // nproc), least=1)
    restarts = whole(env, "MAX_RESTARTS", default=SCRIPT_RESTARTS)
    id = f"local.{os.getpid()}"
    return spec("1", port=0, id=id, is_host=True, nproc=nproc, max_restarts=restarts, threads=threads)
