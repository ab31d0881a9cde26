"""What a node is to run, and the torchrun line that says so."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.errors import ConfigError
from train.faults.agent import STUCK_S

ACCEPTS = "train.accepts"
"""The module that says whether the trainer would accept overrides."""
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Or a surviving agent keeps the address of the group from a node that joins late or anew."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that the workers have for the last checkpoint (torchrun's own: 30)."""
MARGIN_S = 10  # of the grace time, for the agent's own end and for what reads the outcome


@dataclass(frozen=True)
class Timings:
    """The keys of `--rdzv-conf`, in whole seconds. These values are for nodes on a network."""

    join_timeout: int = 300
    """For the slowest node to arrive: prologs and images take minutes, and a wait costs nothing."""
    last_call_timeout: int = 5
    """How long a round that has enough nodes waits for more: a part of every recovery (torchrun's own: 30)."""
    keep_alive_interval: int = 1
    keep_alive_max_attempt: int = 5
    """A node is lost after so many intervals without a sign of it: longer than a busy network is silent."""
    read_timeout: int = 20
    """Of one request to the store; an agent that answers no sooner than `STUCK_S` is taken to hang, and is ended."""

    def __post_init__(self) -> None:
        assert self.read_timeout < STUCK_S

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in vars(self).items())


@dataclass(frozen=True)
class Dynamic:
    """Rendezvous by c10d: nodes come and go."""

    endpoint: str
    id: str
    is_host: bool
    """Whether this agent holds the store. Never left to torchrun, which guesses it from names and addresses."""
    timings: Timings = Timings()

    def flags(self) -> list[str]:
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.id}",
            f"--rdzv-conf=is_host={int(self.is_host)},{self.timings}",
        ]


@dataclass(frozen=True)
class Static:
    """Rendezvous at a given address, with given node ranks: all nodes, or none."""

    master_addr: str
    master_port: int
    node_rank: int

    def flags(self) -> list[str]:
        return [
            f"--master-addr={self.master_addr}",
            f"--master-port={self.master_port}",
            f"--node-rank={self.node_rank}",
        ]


@dataclass(frozen=True)
class Spec:
    """One node's part of a launch."""

    nnodes: str
    """N, or MIN:MAX."""
    nproc: str
    """Processes of this node: a number, or torchrun's `gpu`, `cpu` or `auto`."""
    max_restarts: int
    rendezvous: Dynamic | Static
    local_addr: str
    """What other nodes reach this one by: rank 0's becomes MASTER_ADDR, and a name may leave the DNS before its pod ends."""
    grace_s: int
    """Seconds from SIGTERM to SIGKILL on this substrate."""
    threads: int
    """Of OpenMP, for each process."""
    job: str = ""
    """The job's name, the same on all its nodes and when it is started again; empty: the rendezvous id will do."""

    @property
    def job_name(self) -> str:
        return self.job or (f"torchrun:{self.rendezvous.id}" if isinstance(self.rendezvous, Dynamic) else "")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(:\d+)?", self.nnodes) or not re.fullmatch(r"\d+|auto|cpu|gpu", self.nproc):
            raise ConfigError(
                f"nnodes={self.nnodes} and nproc={self.nproc} do not start any process: use N or MIN:MAX nodes, and a number of processes, auto, cpu or gpu"
            )
        if self.grace_s <= MARGIN_S:
            raise ConfigError(f"GRACE_S={self.grace_s} leaves no time to save a checkpoint: use more than {MARGIN_S}")


def environment(spec: Spec) -> dict[str, str]:
    """The variables without which torchrun would not do what the line says."""
    return {
        **UNSHARED,
        SHUTDOWN: str(spec.grace_s - MARGIN_S),
        "OMP_NUM_THREADS": str(spec.threads),
    }


def command(
    spec: Spec, overrides: Sequence[str], *, torchrun: Sequence[str] = ("torchrun",), module: str | None = None
) -> list[str]:
    """The line that starts this node's agent, whose ranks run `module`, or train."""
    return [
        *torchrun,
        f"--nnodes={spec.nnodes}",
        f"--nproc-per-node={spec.nproc}",
        f"--max-restarts={spec.max_restarts}",
        *spec.rendezvous.flags(),
        f"--local-addr={spec.local_addr}",
        "-m",
        module or entry(),
        *overrides,
    ]


def entry() -> str:
    """The module that ranks run: `muster` where the folder they start in has a `train` of its own, which Python finds first."""
    here = Path.cwd()
    own = (here / "train.py").exists() or (here / "train").is_dir()
    return "muster" if own and (here / "train").resolve() != Path(__file__).resolve().parents[1] else "train"


def printed(spec: Spec, line: Sequence[str]) -> str:
    """One line that a person can read, and a shell run again."""
    settings = (f"{key}={shlex.quote(value)}" for key, value in environment(spec).items())
    return " ".join((*settings, shlex.join(line)))


def this_torchrun() -> list[str]:
    """torchrun of this Python: by its short name where a shell would find the same, else so that any shell finds it."""
    return ["torchrun"] if _beside_python() else [sys.executable, "-m", "torch.distributed.run"]


def steady_torchrun() -> list[str]:
    """The same, as torchrun.py has it; a script of a site's own by the name torchrun is left as it is."""
    found = _beside_python()
    if found and b"from torch.distributed.run import main" not in found.read_bytes():
        return ["torchrun"]
    return [sys.executable, "-P", str(Path(__file__).with_name("torchrun.py"))]


def _beside_python() -> Path | None:
    found = shutil.which("torchrun")
    return Path(found) if found and Path(found).parent == Path(sys.executable).parent else None
