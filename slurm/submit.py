"""Send a run, or a sweep of runs, to Slurm through submitit: `python slurm/submit.py [options] [overrides]`.

Overrides are those of `python -m train`; those of the group `cluster` say where and how (cluster.nodes=4,
cluster=local, ...). A job holds one task a node, and each task is one torchrun agent. On submitit's USR2 (shortly before
the time limit) and on Slurm's SIGTERM every agent stops its workers, which save one checkpoint; submitit then requeues
the job, which resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import submitit
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config.compose import compose as compose_run
from train.config.options import conf_folder
from train.errors import ConfigError
from train.faults import attempts as outcome
from train.faults.exit import tell
from train.loggers.console import describe
from train.loggers.jsonl import read


@dataclass
class Cluster:
    """Where a run goes. None leaves it to the cluster's own default."""

    executor: str = "slurm"
    nodes: int = 1
    gpus_per_node: int = 0
    nproc_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: list[str] = field(default_factory=list)
    max_restarts: int = 3
    requeues: int = 100
    signal_delay_s: int = 120
    array_parallelism: int = 256
    log_dir: str = "slurm/logs"


@dataclass
class Local(Cluster):
    """This machine, without Slurm."""

    executor: str = "local"


class Agent:
    """What runs on each node: the elastic agent, in this process, and its workers as `python -m train`."""

    def __init__(self, overrides: list[str], cluster: Cluster, folder: str):
        self.overrides, self.cluster, self.folder = overrides, cluster, folder

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """submitit's hook: what to run when this job is requeued. The run finds its own checkpoint."""
        return submitit.helpers.DelayedSubmission(Agent(self.overrides, self.cluster, self.folder))

    def __call__(self) -> str:
        """Run to the end of the run, and give back how it ended. Raises RuntimeError if it failed."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        environment = submitit.JobEnvironment()
        requeue = signal.getsignal(signal.SIGUSR2)
        told: list[int] = []

        def stop(number: int, _: Any) -> None:
            told.append(number)
            raise SignalException(f"the scheduler sent {signal.Signals(number).name}", signal.SIGTERM)

        signal.signal(signal.SIGUSR2, stop)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # How long the last checkpoint may take once the agents are told to stop; torchrun's own is 30 s.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "110")
        launch = elastic_launch(self._launch_config(environment), sys.executable)
        try:
            launch("-u", "-m", "train", *self.overrides)
        except (SignalException, ChildFailedError) as error:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            record = self._outcome()
            preempted = record.get("outcome") == "preempted"
            # A preemption with a grace time sends SIGTERM alone; a cancelled job no longer counts as running.
            comes_back = signal.SIGUSR2 in told or still_running()
            if comes_back and preempted and environment.global_rank == 0 and callable(requeue):
                requeue(signal.SIGUSR2, None)  # submitit's own handler: asks checkpoint() and requeues
            if not preempted:
                raise RuntimeError(f"{record.get('outcome', 'failed')}: {record.get('error', error)}") from None
        return str(outcome.read(Path(self.folder)).get("outcome", "none"))

    def _outcome(self) -> dict[str, Any]:
        """How it ended. Another node may stop a little later than this one and still have to write it."""
        deadline = time.monotonic() + 15
        while (record := outcome.read(Path(self.folder))).get("outcome") == outcome.RUNNING:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return record

    def _launch_config(self, environment: Any) -> Any:
        from torch.distributed.launcher.api import LaunchConfig

        processes = self.cluster.nproc_per_node or self.cluster.gpus_per_node or 1
        cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", os.cpu_count() or 1))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus // processes)))
        on_slurm = self.cluster.executor == "slurm"
        job = int(os.environ["SLURM_JOB_ID"]) if on_slurm else 0
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        return LaunchConfig(
            min_nodes=self.cluster.nodes,
            max_nodes=self.cluster.nodes,
            nproc_per_node=processes,
            run_id=f"{job}.{restart}" if on_slurm else f"local.{os.getpid()}",
            max_restarts=self.cluster.max_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{environment.hostnames[0]}:{10000 + job % 20000}" if on_slurm else "127.0.0.1:0",
            rdzv_configs={"is_host": int(environment.node == 0), "join_timeout": 300, "last_call_timeout": 5},
            local_addr=os.environ["SLURMD_NODENAME"] if on_slurm else "127.0.0.1",
            start_method="spawn",
        )


def still_running() -> bool:
    """Whether Slurm counts this job as running: not if somebody cancelled it, or if Slurm requeues it by itself."""
    if "SLURM_JOB_ID" not in os.environ:
        return False
    line = ["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]]
    return "JobState=RUNNING" in subprocess.run(line, capture_output=True, text=True, check=False).stdout


def main() -> int:
    """Submit, print where everything is, and wait if told to. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python slurm/submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep: one job for each combination of a=1,2")
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch text, submit nothing")
    parser.add_argument("--wait", action="store_true", help="follow the runs until they end; exit 1 if one failed")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    is_cluster = [text.lstrip("+~").split("=")[0].split(".")[0] == "cluster" for text in arguments.overrides]
    of_cluster = [text for text, yes in zip(arguments.overrides, is_cluster, strict=True) if yes]
    of_run = [text for text, yes in zip(arguments.overrides, is_cluster, strict=True) if not yes]
    try:
        cluster = compose_cluster(of_cluster)
        runs = expand(of_run) if arguments.multirun else [of_run]
        folders = [run_folder(overrides) for overrides in runs]
    except ConfigError as error:
        tell(error)
        return error.exit_code
    agents = [
        Agent([*overrides, f"output_dir={quoted(folder)}"], cluster, folder)
        for overrides, folder in zip(runs, own_folders(runs, folders), strict=True)
    ]
    executor = make_executor(cluster)
    if arguments.dry_run:
        print(sbatch_text(executor, agents))
        return 0
    with executor.batch() if len(agents) > 1 else contextlib.nullcontext():
        jobs = [executor.submit(agent) for agent in agents]
    for job, agent in zip(jobs, agents, strict=True):
        print(f"job {job.job_id}  log {job.paths.stdout}  errors {job.paths.stderr}  run {agent.folder}", flush=True)
    return wait(jobs, agents) if arguments.wait else 0


def compose_cluster(overrides: list[str]) -> Cluster:
    """Raises ConfigError."""
    store = ConfigStore.instance()
    store.store(group="schema/cluster", name="slurm", node=Cluster)
    store.store(group="schema/cluster", name="local", node=Local)
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            cluster = OmegaConf.to_object(compose("submit", overrides=overrides).cluster)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        valid = ", ".join(vars(Cluster()))
        raise ConfigError(
            f"{' '.join(str(error).split())}; valid: cluster=slurm or local, and cluster. {valid}"
        ) from None
    assert isinstance(cluster, Cluster)
    for key in ("nodes", "timeout_min"):
        if getattr(cluster, key) < 1:
            raise ConfigError(f"cluster.{key}={getattr(cluster, key)} is out of range: use a value of at least 1")
    if isinstance(cluster, Local) and cluster.nodes > 1:
        raise ConfigError(
            f"cluster=local is one machine, and cluster.nodes={cluster.nodes}: use cluster.nproc_per_node"
        )
    return cluster


def expand(overrides: list[str]) -> list[list[str]]:
    """The combinations of a sweep, in Hydra's order."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]


def run_folder(overrides: list[str]) -> str:
    """The folder that these overrides lead to, in full. Raises ConfigError if the run would refuse them."""
    config = compose_run(overrides)
    return str(Path(config.output_dir).resolve())


def own_folders(runs: list[list[str]], folders: list[str]) -> list[str]:
    """Runs of a sweep that would share a folder get one each, named by what differs between them."""
    if len(set(folders)) == len(folders):
        return folders
    common = set.intersection(*(set(run) for run in runs))
    names = [",".join(text for text in run if text not in common) or str(n) for n, run in enumerate(runs)]
    return [f"{folder}/{name.replace('/', '_')}" for folder, name in zip(folders, names, strict=True)]


def quoted(path: str) -> str:
    """As a value in Hydra's grammar, whatever is in it."""
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


def make_executor(cluster: Cluster) -> submitit.AutoExecutor:
    options: dict[str, Any] = {}
    if cluster.executor == "slurm":
        options["slurm_max_num_timeout"] = cluster.requeues
    executor = submitit.AutoExecutor(folder=cluster.log_dir, cluster=cluster.executor, **options)
    parameters: dict[str, Any] = {
        "name": "muster", "nodes": cluster.nodes, "tasks_per_node": 1, "timeout_min": cluster.timeout_min,
        "gpus_per_node": cluster.gpus_per_node or None, "cpus_per_task": cluster.cpus_per_task, "mem_gb": cluster.mem_gb,
        "slurm_partition": cluster.partition, "slurm_account": cluster.account, "slurm_qos": cluster.qos,
        "slurm_constraint": cluster.constraint, "slurm_setup": list(cluster.setup) or None,
        "slurm_signal_delay_s": cluster.signal_delay_s, "slurm_array_parallelism": cluster.array_parallelism,
    }  # fmt: skip
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
    return executor


def sbatch_text(executor: submitit.AutoExecutor, agents: list[Agent]) -> str:
    """What would be sent. Only Slurm has such a text."""
    if executor.cluster != "slurm":
        return "\n".join(
            f"local: {sys.executable} -m torch.distributed.run -m train {' '.join(a.overrides)}" for a in agents
        )
    inner: Any = executor._executor
    inner.map_count = len(agents) if len(agents) > 1 else None
    text: str = inner._make_submission_file_text(inner._submitit_command_str, "dry-run")
    return text + "".join(f"\n# job {n}: {' '.join(agent.overrides)}" for n, agent in enumerate(agents))


def wait(jobs: list[submitit.Job[str]], agents: list[Agent]) -> int:
    """Print each run's news until all have ended; the run's own files tell, as sacct may not be there."""
    seen = [0] * len(jobs)
    while True:
        done = [job.done() for job in jobs]
        for n, agent in enumerate(agents):
            lines = read(Path(agent.folder) / "metrics.jsonl")
            for line in lines[seen[n] :]:
                total = next((x["total_steps"] for x in reversed(lines) if "total_steps" in x), 0)
                print(f"[{jobs[n].job_id}] {describe(line, total)}", flush=True)
            seen[n] = max(seen[n], len(lines)) if len(lines) >= seen[n] else len(lines)
        if all(done):
            break
        time.sleep(1)
    failed = 0
    for job, agent in zip(jobs, agents, strict=True):
        try:
            ended = job.results()[0]
        except Exception as error:  # submitit raises kinds of its own for each way to fail
            ended, failed = f"failed: {' '.join(str(error).split())[-300:]}", 1
        print(f"[{job.job_id}] {ended}  {agent.folder}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
