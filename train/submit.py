"""Submit a run, or a sweep of runs, to Slurm through submitit: `python slurm/submit.py [options] [overrides]`.

`python slurm/submit.py [options] [cluster overrides] -- my.py --lr 1e-3` submits a training script of your own. The
overrides are those of `python -m train`, and those of the group `cluster` for the job (cluster.nodes=4,
cluster=local, ...). A job has one task per node, and each task starts one torchrun agent through `muster launch`. On
submitit's USR2 (shortly before the time limit) and on Slurm's SIGTERM every agent stops its workers, which save one
checkpoint; submitit then requeues the job, which resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import submitit
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from submitit.core.utils import FailedJobError

from muster.errors import ConfigError, Preempted, one_line, say, tell
from muster.launcher import execute, loopback, slurm, verdict
from muster.launcher.script import MARK, Script, script_of
from muster.launcher.spec import MARGIN_S, NUMA_BINDINGS, Spec, command, printed, this_torchrun
from muster.launcher.variables import one_of, whole
from muster.loggers.console import describe
from muster.loggers.jsonl import read
from muster.redact import redacted
from muster.train.config.choices import conf_folder
from muster.train.config.command_line import parsed, readable
from muster.train.config.compose import compose as compose_run
from muster.train.config.compose import searched
from muster.train.config.error_messages import explain
from muster.train.config.sweeper import folder_of

CPUS_FOR_SRUN = ('[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',)
"""Of Slurm 22.05 to 23.02, whose srun does not inherit --cpus-per-task from the job."""


@dataclass
class Cluster:
    """The resources of a job. None: the cluster's default; of `nproc_per_node`: `gpus_per_node`, or 1 without GPUs."""

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
    numa_binding: str = ""
    max_restarts: int = 3
    requeues: int = 100
    signal_delay_s: int = 120
    array_parallelism: int = 256
    log_dir: str = "slurm/logs"


@dataclass
class Local(Cluster):
    """A job on this machine, without Slurm."""

    executor: str = "local"


class Agent:
    """The task of each node: the launcher of `muster launch`, which runs torchrun."""

    def __init__(self, overrides: list[str], cluster: Cluster, folder: str):
        self.overrides, self.cluster, self.folder = overrides, cluster, folder

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return the task for the requeued job. submitit calls this hook; the run finds its own checkpoint."""
        return submitit.helpers.DelayedSubmission(Agent(self.overrides, self.cluster, self.folder))

    def __call__(self) -> str:
        """Run the agent until the run ends and return the outcome. Raises RuntimeError if the run failed."""
        environment = submitit.JobEnvironment()
        requeue = signal.getsignal(signal.SIGUSR2)
        policy = verdict.SUBMITIT if self._on_slurm else verdict.LOCAL
        try:
            end = self.run(self.spec(environment.hostnames[0]), policy)
        except ConfigError as error:
            raise RuntimeError(one_line(error)) from None
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # A preemption with a grace time sends only SIGTERM; a cancelled job is no longer RUNNING.
        comes_back = end.verdict.requeue and (signal.SIGUSR2 in end.signals or still_running())
        if comes_back and environment.global_rank == 0 and callable(requeue):
            requeue(signal.SIGUSR2, None)  # submitit's own handler: calls checkpoint() and requeues
        if end.verdict.code not in (0, Preempted.exit_code) and not comes_back:
            raise RuntimeError(end.verdict.line)
        return str(end.record.get("outcome", "none"))

    def run(self, spec: Spec, policy: verdict.Policy) -> execute.AgentEnd:
        if not (script := script_of(self.overrides)):
            return execute.run(spec, self.overrides, policy=policy, folders=[Path(self.folder)])
        so_far = whole(os.environ, "SLURM_RESTART_COUNT", default=0)
        bound = verdict.Requeues(so_far, self.cluster.requeues)
        end = execute.run_script(spec, script, policy=policy, requeues=bound)
        if end.verdict.line:
            say(f"muster: {script.name}: {end.verdict.line}")
        return end

    def spec(self, head: str) -> Spec:
        """Return this node's spec, for a job whose first node is `head`."""
        processes = self.cluster.nproc_per_node or self.cluster.gpus_per_node or 1
        restarts = self.cluster.max_restarts
        if not self._on_slurm:
            threads = whole(os.environ, "OMP_NUM_THREADS", default=max(1, (os.cpu_count() or 1) // processes), least=1)
            kwargs = {"nproc": processes, "max_restarts": restarts, "threads": threads}
            spec = loopback.spec("1", port=0, id=f"local.{os.getpid()}", is_host=True, **kwargs)
        else:
            told = {"HEAD": head, "MAX_RESTARTS": str(restarts), "GRACE_S": str(self.cluster.signal_delay_s)}
            spec = slurm.spec({**os.environ, **told}, nproc=processes)
        return replace(spec, numa_binding=self.cluster.numa_binding)

    @property
    def name(self) -> str:
        """The run's folder, or the name of the user's own script."""
        return self.folder or Script(tuple(self.overrides[1:])).name

    @property
    def _on_slurm(self) -> bool:
        return self.cluster.executor == "slurm"


def still_running() -> bool:
    """Return True if Slurm reports this job as RUNNING; False if it was cancelled or Slurm requeues it by itself."""
    if "SLURM_JOB_ID" not in os.environ:
        return False
    line = ["scontrol", "show", "job", slurm.job_name(os.environ)]
    return "JobState=RUNNING" in subprocess.run(line, capture_output=True, text=True, check=False).stdout


def submit(
    given: Sequence[str], *, name: str = "muster", words: Sequence[str] = (), cluster: Sequence[str] = ()
) -> int:
    """Submit a run, print its job id, logs and folder, and follow it with --wait. Returns the exit code.

    Args:
        given: the command line: options, overrides of the run and of `cluster`, or `--` and a script. See --help.
        name: the job's name in Slurm.
        words: the project's own job, if `given` names no script: overrides that come before those of `given`, or `--` and a
            script with its arguments.
        cluster: the project's own overrides of `cluster`; those of `given` come after them.
    """
    parser = argparse.ArgumentParser(
        prog="python slurm/submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: one job per combination of a=1,2")
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch script without submitting it")
    parser.add_argument("--wait", action="store_true", help="follow the runs until they end; exit 1 if one failed")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="FOLDER", help="a folder of your own options")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = [*given]
    at = given.index(MARK) if MARK in given else len(given)
    arguments = parser.parse_intermixed_args(given[:at])
    of_cluster = [
        str(each.input_line)
        for each in readable(arguments.overrides)
        if each.key_or_group.partition(".")[0] == "cluster"
    ]
    of_run = [text for text in arguments.overrides if text not in of_cluster]
    of_cluster = [*cluster, *of_cluster]
    if MARK not in given:
        of_run = [*words, *of_run]
    own = arguments.config_dir and arguments.config_dir.absolute()
    try:
        resources = compose_cluster(of_cluster, config_dir=own)
        if script := script_of([*of_run, *given[at:]]):
            agents = [agent_of(script, resources, multirun=arguments.multirun)]
        else:
            agents = agents_of(expand(of_run) if arguments.multirun else [of_run], resources, config_dir=own)
    except ConfigError as error:
        tell(error)
        return error.exit_code
    try:
        executor = make_executor(resources, name=name, submits=not arguments.dry_run)
    except RuntimeError as error:  # submitit found no sbatch
        tell(
            ConfigError(
                f"cluster.executor={resources.executor}: {one_line(error)}; use cluster=local without Slurm, or "
                "--dry-run to see the sbatch script"
            )
        )
        return ConfigError.exit_code
    if arguments.dry_run:
        print(redacted(sbatch_text(executor, agents)))
        return 0
    try:
        with executor.batch() if len(agents) > 1 else contextlib.nullcontext():
            jobs = [executor.submit(agent) for agent in agents]
    except (FailedJobError, OSError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0].removeprefix("sbatch: error: ")[:200]
        tell(ConfigError(f"Slurm rejected the job: {reason}; try `sinfo`, check --dry-run, or use cluster=local"))
        return ConfigError.exit_code
    for job, agent in zip(jobs, agents, strict=True):
        print(f"job {job.job_id}  log {job.paths.stdout}  errors {job.paths.stderr}  run {agent.name}", flush=True)
    return wait(jobs, agents) if arguments.wait else 0


def agents_of(runs: list[list[str]], cluster: Cluster, *, config_dir: Path | None = None) -> list[Agent]:
    """Return the agent of each run, given by its overrides. Raises ConfigError."""
    folders = own_folders(runs, [run_folder(overrides, config_dir=config_dir) for overrides in runs])
    options = ["--config-dir", str(config_dir)] if config_dir else []
    return [
        Agent([*overrides, f"output_dir={quoted(folder)}", *options], cluster, folder)
        for overrides, folder in zip(runs, folders, strict=True)
    ]


def agent_of(script: Script, cluster: Cluster, *, multirun: bool) -> Agent:
    """Return the agent of a user's own script. Raises ConfigError."""
    if multirun:
        raise ConfigError(f"-m sweeps overrides, and {script.name} takes none: submit it once for each choice")
    script.check()
    return Agent(script.given, cluster, "")


def compose_cluster(overrides: list[str], *, config_dir: Path | None = None) -> Cluster:
    """Compose the keys of `cluster` from its overrides and the user's own options. Raises ConfigError."""
    store = ConfigStore.instance()
    store.store(group="schema/cluster", name="slurm", node=Cluster)
    store.store(group="schema/cluster", name="local", node=Local)
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            cluster = OmegaConf.to_object(compose("submit", overrides=[*overrides, *searched(config_dir)]).cluster)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        valid = ", ".join(vars(Cluster()))
        raise ConfigError(
            f"{' '.join(str(error).split())}; valid: cluster=slurm or local, and cluster. {valid}"
        ) from None
    if not isinstance(cluster, Cluster):
        raise ConfigError(
            "the yaml file of your cluster has no schema: begin it with `defaults: [/schema/cluster/slurm@_here_, _self_]`, "
            "or with /schema/cluster/local@_here_"
        )
    for key, least in (("nodes", 1), ("timeout_min", 1), ("signal_delay_s", MARGIN_S + 1)):
        if getattr(cluster, key) < least:
            raise ConfigError(f"cluster.{key}={getattr(cluster, key)} is out of range: use a value of at least {least}")
    one_of({"cluster.numa_binding": cluster.numa_binding}, "cluster.numa_binding", NUMA_BINDINGS)
    if isinstance(cluster, Local) and cluster.nodes > 1:
        raise ConfigError(
            f"cluster=local is one machine, and cluster.nodes={cluster.nodes}: use cluster.nproc_per_node"
        )
    return cluster


def expand(overrides: list[str]) -> list[list[str]]:
    """Return the combinations of a sweep, in Hydra's order. Raises ConfigError."""
    try:
        batches = BasicSweeper.split_arguments(parsed(overrides), max_batch_size=None)
    except HydraException as error:
        raise explain(error, overrides) from None
    return [list(job) for batch in batches for job in batch]


def run_folder(overrides: list[str], *, config_dir: Path | None = None) -> str:
    """Return the absolute folder of the run with these overrides. Raises ConfigError if the run would refuse them."""
    config = compose_run(overrides, config_dir=config_dir)
    return str(Path(config.output_dir).resolve())


def own_folders(runs: list[list[str]], folders: list[str]) -> list[str]:
    """Return a folder for each run of a sweep; runs that would share one get folders named by their differences."""
    if len(set(folders)) == len(folders):
        return folders
    common = set.intersection(*(set(run) for run in runs))
    names = [folder_of([text for text in run if text not in common]) or str(n) for n, run in enumerate(runs)]
    return [f"{folder}/{name}" for folder, name in zip(folders, names, strict=True)]


def quoted(path: str) -> str:
    return str(QuotedString(path, Quote.single).with_quotes())


def make_executor(cluster: Cluster, *, name: str, submits: bool = True) -> submitit.AutoExecutor:
    """Create submitit's executor. Raises RuntimeError if it `submits` to Slurm and Slurm is missing."""
    if not submits:  # submitit looks for srun, which a dry run does not need
        kind: Any = submitit.SlurmExecutor
        kind.affinity = classmethod(lambda _: 1)
    options: dict[str, Any] = {}
    if cluster.executor == "slurm":
        options["slurm_max_num_timeout"] = cluster.requeues
    executor = submitit.AutoExecutor(folder=cluster.log_dir, cluster=cluster.executor, **options)
    parameters: dict[str, Any] = {
        "name": name, "nodes": cluster.nodes, "tasks_per_node": 1, "timeout_min": cluster.timeout_min,
        "gpus_per_node": cluster.gpus_per_node or None, "cpus_per_task": cluster.cpus_per_task, "mem_gb": cluster.mem_gb,
        "slurm_partition": cluster.partition, "slurm_account": cluster.account, "slurm_qos": cluster.qos,
        "slurm_constraint": cluster.constraint, "slurm_setup": [*CPUS_FOR_SRUN, *cluster.setup],
        "slurm_signal_delay_s": cluster.signal_delay_s, "slurm_array_parallelism": cluster.array_parallelism,
    }  # fmt: skip
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
    return executor


def sbatch_text(executor: submitit.AutoExecutor, agents: list[Agent]) -> str:
    """Return the sbatch script that would be submitted; with cluster=local, the torchrun commands."""
    if executor.cluster != "slurm":
        specs = [agent.spec("") for agent in agents]
        lines = [command(spec, a.overrides, torchrun=this_torchrun()) for spec, a in zip(specs, agents, strict=True)]
        return "\n".join(f"local: {printed(spec, line)}" for spec, line in zip(specs, lines, strict=True))
    inner: Any = executor._executor
    inner.map_count = len(agents) if len(agents) > 1 else None
    text: str = inner._make_submission_file_text(inner._submitit_command_str, "dry-run")
    return text + "".join(f"\n# job {n}: {shlex.join(agent.overrides)}" for n, agent in enumerate(agents))


def wait(jobs: list[submitit.Job[str]], agents: list[Agent]) -> int:
    """Print new records of each run until all have ended, from its files, as sacct may be missing. Returns 1 if a run failed, else 0."""
    seen = [0] * len(jobs)
    while True:
        done = [job.done() for job in jobs]
        for n, agent in enumerate(agents):
            if not agent.folder:  # a script keeps no records that are known here: see its log
                continue
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
        except Exception as error:  # submitit raises its own exception types
            failed, text = 1, str(error)
            if "RuntimeError: " in text:  # an agent's own line, of submitit's report
                text = text.rpartition("RuntimeError: ")[2].partition("\n-----")[0]
            ended = f"failed: {redacted(' '.join(text.split()))[-300:]}"
        print(f"[{job.job_id}] {ended}  {agent.name}", flush=True)
    return failed
