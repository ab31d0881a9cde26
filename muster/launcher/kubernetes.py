"""Kubernetes: build a pod's spec from the variables of an operator and of this kit's manifests. All raise ConfigError."""

from __future__ import annotations

from collections.abc import Mapping

from muster.launcher.spec import Dynamic, Spec, Static, Timings, endpoint
from muster.launcher.variables import port, text, whole

PORT = 29500
MAX_RESTARTS = 100  # pods come and go while the job lives; a crash loop ends with exit code 7
TIMINGS = Timings(join_timeout=600)  # pods pull images, and may be scheduled one by one


def pytorchjob(env: Mapping[str, str]) -> Spec:
    """PyTorchJob: Training Operator v1, elastic. Worker 0 holds the store.

    The operator sets `PET_*` from elasticPolicy. With hostNetwork a pod's HOSTNAME is its node's, so the manifest sets POD_NAME.
    """
    at = text(env, "PET_RDZV_ENDPOINT")
    host = at.rpartition(":")[0]
    own = env.get("POD_NAME") or text(env, "HOSTNAME")
    rendezvous = Dynamic(
        endpoint=at,
        id=env.get("PET_RDZV_ID") or host,
        is_host=own.split(".")[0] == host.split(".")[0],
        timings=TIMINGS,
        # A pod that ends is replaced at once. While a quota refuses a pod, the operator makes no Service until one has ended.
        awaits_host=False,
    )
    restarts = whole(env, "PET_MAX_RESTARTS", default=MAX_RESTARTS)
    return _pod(env, text(env, "PET_NNODES"), text(env, "PET_NPROC_PER_NODE"), restarts, rendezvous, head=host)


def static(env: Mapping[str, str]) -> Spec:
    """TrainJob (Trainer v2), or PyTorchJob without elasticPolicy. The job is restarted as a whole: no agent restarts its ranks."""
    rendezvous = Static(
        master_addr=text(env, "PET_MASTER_ADDR"),
        master_port=whole(env, "PET_MASTER_PORT", default=PORT, least=1),
        node_rank=whole(env, "PET_NODE_RANK"),
    )
    return _pod(
        env, text(env, "PET_NNODES"), text(env, "PET_NPROC_PER_NODE"), 0, rendezvous, head=rendezvous.master_addr
    )


def indexed_job(env: Mapping[str, str]) -> Spec:
    """Indexed Job, without an operator. `HEAD` is pod 0's own name: a Service's name would resolve to several addresses."""
    head = text(env, "HEAD")
    is_host = whole(env, "JOB_COMPLETION_INDEX") == 0
    rendezvous = Dynamic(endpoint=endpoint(head, port(env, default=PORT)), id=head, is_host=is_host, timings=TIMINGS)
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
        job=f"kubernetes:{head}",  # by name: pods of a deleted and re-applied job may still be ending
    )
