"""Slurm: build a node's spec from a job's environment. The launching script sets `HEAD` to the first node's name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from muster.errors import ConfigError, say
from muster.launcher import bad_nodes
from muster.launcher.spec import Dynamic, Spec, endpoint, is_free
from muster.launcher.variables import port, text, whole
from muster.launcher.verdict import Requeues

FIRST_PORT, PORTS, TRIED = 10000, 20000, 100
GRACE_S = 120  # as --signal=B:USR1@120 in the batch scripts, and submit.py's signal_delay_s


def spec(env: Mapping[str, str], *, nproc: int | None = None) -> Spec:
    """One agent per node, with a process for each GPU from Slurm, or `NPROC`. Raises ConfigError."""
    job = whole(env, "SLURM_JOB_ID")
    nproc = nproc or processes(env)
    per_gpu = whole(env, "SLURM_CPUS_PER_GPU", default=0)
    cpus = whole(env, "SLURM_CPUS_PER_TASK", default=per_gpu * nproc or 1, least=1)
    return Spec(
        nnodes=nnodes(env),
        nproc=str(nproc),
        max_restarts=whole(env, "MAX_RESTARTS", default=3),
        rendezvous=Dynamic(
            endpoint=endpoint(text(env, "HEAD"), port(env, default=port_of(job))),
            id=f"{job}.{whole(env, 'SLURM_RESTART_COUNT', default=0)}",
            is_host=whole(env, "SLURM_NODEID") == 0,
        ),
        local_addr=text(env, "SLURMD_NODENAME"),
        grace_s=whole(env, "GRACE_S", default=GRACE_S),
        threads=whole(env, "OMP_NUM_THREADS", default=-(-cpus // nproc), least=1),
        job=job_id(env),
    )


def processes(env: Mapping[str, str]) -> int:
    """Return the processes of a node. Raises ConfigError: several tasks per node, but a task is a node's agent."""
    count = whole(env, "SLURM_GPUS_ON_NODE", default=0) or whole(env, "NPROC", default=1, least=1)
    tasks = whole(env, "SLURM_NTASKS_PER_NODE", default=1)
    if tasks not in (1, count):
        raise ConfigError(
            f"--ntasks-per-node={tasks} has no effect: a node has one agent, which starts {count} processes, one for each GPU or "
            f"NPROC. Leave it out; on nodes without GPUs give --cpus-per-task and --export=ALL,NPROC={tasks}"
        )
    return count


def job_id(env: Mapping[str, str]) -> str:
    """Return the job's id as in `environment.job`; empty outside of a job."""
    return f"slurm:{env['SLURM_JOB_ID']}" if env.get("SLURM_JOB_ID") else ""


def port_of(job: int) -> int:
    """Return a port that differs between jobs on one node; below the range of outgoing connections."""
    return FIRST_PORT + job % PORTS


def free_port(env: Mapping[str, str]) -> int:
    """Return the first free port here, on the first node: MASTER_PORT, or from `port_of` on. Raises ConfigError."""
    job = whole(env, "SLURM_JOB_ID")
    tried = [port(env, default=port_of(job)), *(port_of(job + more) for more in range(TRIED))]
    found = next(filter(is_free, tried), tried[0])
    if env.get("MASTER_PORT") and found != tried[0]:
        say(f"muster: MASTER_PORT={tried[0]} is in use on the first node: {found} is taken")
    return found


def nnodes(env: Mapping[str, str]) -> str:
    """Return N, or MIN_NODES:N. Raises ConfigError."""
    nodes = whole(env, "SLURM_JOB_NUM_NODES", least=1)
    if not env.get("MIN_NODES"):
        return str(nodes)
    fewest = whole(env, "MIN_NODES", least=1)
    if fewest > nodes:
        raise ConfigError(f"MIN_NODES={fewest} is out of range: the job has {nodes} nodes, use 1 to {nodes}")
    return f"{fewest}:{nodes}"


def job_name(env: Mapping[str, str]) -> str:
    """Return the id for scontrol and scancel. In an array's last task SLURM_JOB_ID is the id of the whole array."""
    if env.get("SLURM_ARRAY_TASK_ID"):
        return f"{text(env, 'SLURM_ARRAY_JOB_ID')}_{env['SLURM_ARRAY_TASK_ID']}"
    return text(env, "SLURM_JOB_ID")


def requeues(env: Mapping[str, str]) -> Requeues:
    so_far, most = whole(env, "SLURM_RESTART_COUNT", default=0), whole(env, "MAX_REQUEUES", default=Requeues.most)
    return Requeues(so_far, most)


def most_excluded(env: Mapping[str, str]) -> int:
    return whole(env, "MAX_EXCLUDED", default=bad_nodes.MOST)


def srun_flags(env: Mapping[str, str]) -> list[str]:
    """Return srun's flags: an elastic job outlives lost nodes, any other ends with the first. Raises ConfigError."""
    processes(env)
    elastic = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    fixed = ["--kill-on-bad-exit=0", "--wait=120"]
    tasks = [f"--ntasks={whole(env, 'SLURM_JOB_NUM_NODES', least=1)}", "--ntasks-per-node=1"]
    return [*tasks, *(elastic if env.get("MIN_NODES") else fixed)]


def note_of_components(env: Mapping[str, str]) -> str:
    """Return a note for a heterogeneous job, whose components srun does not join; empty for any other job."""
    if (count := whole(env, "SLURM_HET_SIZE", default=1)) < 2:
        return ""
    return (
        f"of this heterogeneous job's {count} components, the run has the nodes of the first ({env['SLURM_JOB_NUM_NODES']}); "
        "the others stay idle"
    )


def srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return srun's variables: the port and, as srun does not inherit it since Slurm 22.05, --cpus-per-task. Raises ConfigError."""
    cpus = {"SRUN_CPUS_PER_TASK": env["SLURM_CPUS_PER_TASK"]} if env.get("SLURM_CPUS_PER_TASK") else {}
    return {"MASTER_PORT": str(free_port(env)), **cpus}


def assignments(values: Mapping[str, str | Sequence[str]]) -> str:
    """Return shell assignments for `eval`; a sequence becomes an array."""
    return "\n".join(
        f"{name}={shlex.quote(value) if isinstance(value, str) else f'({shlex.join(value)})'}"
        for name, value in values.items()
    )
