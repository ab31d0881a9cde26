"""The specification of a node's agent, and the torchrun command that starts it."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.errors import ConfigError
from muster.faults.agent import STUCK_S
from muster.launcher.script import script_of
from muster.launcher.variables import whole

ACCEPTS = "muster.train.validate"
"""Checks whether the trainer accepts overrides."""
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it a surviving agent does not tell a node that joins late the group's address."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that workers have for the last checkpoint (torchrun's default: 30)."""
SCRIPT_RESTARTS = 3
"""Restarts of a user's own script, which has no record of its progress to end a crash loop."""
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""What torchrun's `--numa-binding` takes."""
MARGIN_S = 10  # of the grace period, for the agent to end and the launcher to read the outcome


@dataclass(frozen=True)
class Timings:
    """The keys of `--rdzv-conf`, in whole seconds. The defaults are for nodes on a network."""

    join_timeout: int = 300
    """For the slowest node: prologs and images take minutes, and waiting costs nothing."""
    last_call_timeout: int = 5
    """How long a round with enough nodes waits for more; part of every recovery (torchrun's default: 30)."""
    keep_alive_interval: int = 1
    keep_alive_max_attempt: int = 5
    """Intervals without a sign of life until a node is lost; longer than a busy network is silent."""
    read_timeout: int = 20
    """Of one request to the store; less than `STUCK_S`, after which an agent counts as hung."""

    def __post_init__(self) -> None:
        assert self.read_timeout < STUCK_S

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in vars(self).items())


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_free(port: int) -> bool:
    """Whether a store could listen at `port` of this host; 0 is any free one."""
    dual = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        ).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


@dataclass(frozen=True)
class Dynamic:
    """Rendezvous by c10d: nodes may come and go."""

    endpoint: str
    id: str
    is_host: bool
    """This agent holds the store. Always passed on: torchrun would guess it from names and addresses."""
    timings: Timings = Timings()
    awaits_host: bool = True
    """Start torchrun only when the host listens: torchrun itself gives up after two `read_timeout`."""

    def flags(self) -> list[str]:
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.id}",
            f"--rdzv-conf=is_host={int(self.is_host)},{self.timings}",
        ]


@dataclass(frozen=True)
class Static:
    """Rendezvous at a given address with given node ranks: all nodes must be present."""

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
    """Processes on this node: a number, or torchrun's `gpu`, `cpu` or `auto`."""
    max_restarts: int
    rendezvous: Dynamic | Static
    local_addr: str
    """This node's address for the others: rank 0's becomes MASTER_ADDR. A name may leave the DNS before its pod ends."""
    grace_s: int
    """Seconds between SIGTERM and SIGKILL on this substrate."""
    threads: int
    """OMP_NUM_THREADS of each process."""
    numa_binding: str = ""
    """torchrun's `--numa-binding`, one of NUMA_BINDINGS: bind a process to processors beside its GPU; empty: no binding."""
    job: str = ""
    """The same on all nodes and when the job is started again."""

    @property
    def job_name(self) -> str:
        """`job`, or a name from the rendezvous id; empty for a static rendezvous without a name."""
        return self.job or (f"torchrun:{self.rendezvous.id}" if isinstance(self.rendezvous, Dynamic) else "")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(:\d+)?", self.nnodes) or not re.fullmatch(r"\d+|auto|cpu|gpu", self.nproc):
            raise ConfigError(
                f"nnodes={self.nnodes} and nproc={self.nproc} do not start any process: use N or MIN:MAX nodes, and a number of processes, auto, cpu or gpu"
            )
        if self.grace_s <= MARGIN_S:
            raise ConfigError(f"GRACE_S={self.grace_s} leaves no time to save a checkpoint: use more than {MARGIN_S}")


def for_script(spec: Spec, env: Mapping[str, str]) -> Spec:
    """Bound the restarts in a row of a user's own script by MAX_RESTARTS. Raises ConfigError."""
    most = whole(env, "MAX_RESTARTS", default=SCRIPT_RESTARTS)
    return replace(spec, max_restarts=min(spec.max_restarts, most))


def environment(spec: Spec) -> dict[str, str]:
    return {
        **UNSHARED,
        SHUTDOWN: str(spec.grace_s - MARGIN_S),
        "OMP_NUM_THREADS": str(spec.threads),
    }


def command(
    spec: Spec, overrides: Sequence[str], *, torchrun: Sequence[str] = ("torchrun",), module: str | None = None
) -> list[str]:
    """Return the agent's command. Its ranks run the script in `overrides`, if there is one; else `module`, by default the trainer."""
    script = script_of(overrides)
    return [
        *torchrun,
        f"--nnodes={spec.nnodes}",
        f"--nproc-per-node={spec.nproc}",
        f"--max-restarts={spec.max_restarts}",
        *spec.rendezvous.flags(),
        f"--local-addr={spec.local_addr}",
        *([f"--numa-binding={spec.numa_binding}"] if spec.numa_binding else ()),
        *(script.for_torchrun if script else ("-m", module or entry(), *overrides)),
    ]


def entry() -> str:
    """Return the module that ranks run: `train` in a clone of the kit, `muster` elsewhere."""
    trainer = Path(__file__).resolve().parents[1] / "train"
    return "train" if (Path.cwd() / "train").resolve() == trainer.resolve() else "muster"


def printed(spec: Spec, line: Sequence[str]) -> str:
    settings = (f"{key}={shlex.quote(value)}" for key, value in environment(spec).items())
    return " ".join((*settings, shlex.join(line)))


def this_torchrun() -> list[str]:
    """Return this Python's torchrun, to print: by its short name if a shell would find it."""
    return ["torchrun"] if _beside_python() else [sys.executable, "-m", "torch.distributed.run"]


def steady_torchrun() -> list[str]:
    """Return torchrun.py, to run; a site's own script named torchrun is used as it is."""
    found = _beside_python()
    if found and b"from torch.distributed.run import main" not in found.read_bytes():
        return ["torchrun"]
    return [sys.executable, "-P", str(Path(__file__).with_name("torchrun.py"))]


def _beside_python() -> Path | None:
    found = shutil.which("torchrun")
    return Path(found) if found and Path(found).parent == Path(sys.executable).parent else None
