"""Kubernetes: from the variables that an API injects, and those of our manifests, to what a pod runs."""

from __future__ import annotations

from collections.abc import Mapping

from train.launch.spec import Dynamic, Spec, Static, Timings
from train.launch.variables import text, whole

PORT = 29500
MAX_RESTARTS = 100  # pods come and go for as long as the job lives; a crash loop ends by itself, with exit code 7
TIMINGS = Timings(join_timeout=600)  # images are pulled, and pods are queued one by one


def pytorchjob(env: Mapping[str, str]) -> Spec:
    """Training Operator v1, elastic: `PET_*` from its elasticPolicy, worker 0 holds the store. Raises ConfigError."""
    endpoint = text(env, "PET_RDZV_ENDPOINT")
    host = endpoint.rpartition(":")[0]
    rendezvous = Dynamic(
        endpoint=endpoint,
        id=env.get("PET_RDZV_ID") or host,
        is_host=text(env, "HOSTNAME") == host.split(".")[0],
        timings=TIMINGS,
    )
    restarts = whole(env, "PET_MAX_RESTARTS", default=MAX_RESTARTS)
    return _pod(env, text(env, "PET_NNODES"), text(env, "PET_NPROC_PER_NODE"), restarts, rendezvous, head=host)


def trainjob(env: Mapping[str, str]) -> Spec:
    """Trainer v2: static, the job is restarted as a whole, so no agent restarts by itself. Raises ConfigError."""
    rendezvous = Static(
        master_addr=text(env, "PET_MASTER_ADDR"),
        master_port=whole(env, "PET_MASTER_PORT", default=PORT, least=1),
        node_rank=whole(env, "PET_NODE_RANK"),
    )
    return _pod(
        env, text(env, "PET_NNODES"), text(env, "PET_NPROC_PER_NODE"), 0, rendezvous, head=rendezvous.master_addr
    )


def indexed_job(env: Mapping[str, str]) -> Spec:
    """No operator: `HEAD` is pod 0's own name (a Service's has several addresses). Raises ConfigError."""
    head = text(env, "HEAD")
    is_host = whole(env, "JOB_COMPLETION_INDEX") == 0
    rendezvous = Dynamic(endpoint=f"{head}:{PORT}", id=head, is_host=is_host, timings=TIMINGS)
    return _pod(env, f"1:{whole(env, 'NNODES', least=1)}", text(env, "NPROC"), MAX_RESTARTS, rendezvous, head=head)


def _pod(
    env: Mapping[str, str], nnodes: str, nproc: str, max_restarts: int, rendezvous: Dynamic | Static, *, head: str
) -> Spec:
    return Spec(
        nnodes=nnodes,
        nproc=nproc,
        max_restarts=max_restarts,
        rendezvous=rendezvous,
        local_addr=text(env, "POD_IP"),
        grace_s=whole(env, "GRACE_S"),
        threads=whole(env, "OMP_NUM_THREADS", default=1, least=1),
        job=f"kubernetes:{head}",  # by name: pods of a job that was deleted and applied anew may still be ending
    )
