"""One machine: tests and benchmarks start several agents on it, and `cluster=local` starts one."""

from __future__ import annotations

from dataclasses import replace

from muster.launcher import compose
from muster.launcher.spec import Dynamic, Spec

ADDRESS = "127.0.0.1"
TIMINGS = replace(compose.TIMINGS, last_call_timeout=1)  # nodes start in the same second
GRACE_S = 40


def spec(
    nnodes: str, *, port: int, id: str, is_host: bool, nproc: int = 1, max_restarts: int = 100, threads: int = 1
) -> Spec:
    """Build the spec of an agent on this machine. Port 0 is any free port, for a world of one node."""
    return Spec(
        nnodes=nnodes,
        nproc=str(nproc),
        max_restarts=max_restarts,
        rendezvous=Dynamic(endpoint=f"{ADDRESS}:{port}", id=id, is_host=is_host, timings=TIMINGS),
        local_addr=ADDRESS,
        grace_s=GRACE_S,
        threads=threads,
    )
