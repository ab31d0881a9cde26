"""The position of this process, as its launcher wrote it into the environment, and the launcher's identity.

Rank arithmetic reads RANK and related variables here; messages to torchrun's agent (faults/agent.py) depend on
LOCAL_RANK alone.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from muster import process
from muster.errors import ConfigError

NODES = "MUSTER_NNODES"
"""Variable in which `muster launch node` gives its ranks the number of nodes (N or MIN:MAX)."""
STEADY = "MUSTER_STEADY_AGENT"
"""Variable that muster/launcher/torchrun.py sets; that file imports nothing of the kit, so it repeats the name."""
AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
OWN_STORE = "MUSTER_OWN_STORE"
"""Variable with the address of a store that rank 0 hosts, although AGENTS says otherwise to torch."""
JOB = "MUSTER_JOB"
"""Variable in which the same command gives the job's name: equal on all nodes, and when the job is started again."""


@dataclass(frozen=True)
class Environment:
    """The position of this process in the job; a single process if the launcher set no variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    shared_file: Path | None = None
    """The file through which ranks meet instead of a port of rank 0, if `dist.init_method` names one."""

    @classmethod
    def from_env(cls, init_method: str = "env://") -> Environment:
        """Raises ConfigError: a variable is not a number, only some are set, or they do not fit `init_method`."""
        if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
            raise ConfigError("only one of RANK and WORLD_SIZE is set: set both, or start through torchrun")
        rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
        shared = Path(init_method.removeprefix("file://")) if init_method.startswith("file://") else None
        if shared and "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                f"dist.init_method={init_method} is for ranks started by hand: under torchrun leave it out"
            )
        if world_size > 1 and not shared and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
            raise ConfigError(
                f"WORLD_SIZE={world_size} needs MASTER_ADDR and MASTER_PORT: set both, start through torchrun, or give "
                "dist.init_method=file:///shared/path"
            )
        if world_size > 1 and not shared and not 0 < _number("MASTER_PORT", 0) < 2**16:
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: give all ranks the same, 1 to 65535"
            )
        places = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), _number("GROUP_RANK", 0)
        return cls(rank, world_size, *places, shared_file=shared)

    @property
    def nodes(self) -> int:
        """The number of nodes, if all have as many ranks as this one."""
        return -(-self.world_size // max(1, self.local_world_size))

    @property
    def is_one_node(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def store_at(self) -> str:
        """The location of the rendezvous store, for messages."""
        return f"file://{self.shared_file}" if self.shared_file else os.environ["MASTER_ADDR"]

    @property
    def hosts_store(self) -> bool:
        """Whether this process holds the rendezvous store, which ends with it, or must remove the store's file."""
        return self.rank == 0 and self.world_size > 1 and not store_is_agents()


def store_is_agents() -> bool:
    """Whether torchrun's agent holds the rendezvous store; otherwise rank 0 does."""
    return os.environ.get(AGENTS) == "True" and os.environ.get(OWN_STORE) != _store_address()


def leave_store() -> None:
    """Tell torch that the store, which rank 0 has hosted for a job, is there for whatever meets at its address next.

    Otherwise `init_process_group` of the script would host one at the same port. Only rank 0 needs it.
    """
    if "RANK" in os.environ and Environment.from_env().hosts_store:
        os.environ |= {AGENTS: "True", OWN_STORE: _store_address()}


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def launcher() -> str:
    """Return the unique id of the process that started this one and restarts it: host:pid:start:pid-namespace.

    A rendezvous id is not unique: users give every launch the same.
    """
    pid = process.launcher_pid() if "RANK" in os.environ else os.getpid()
    return f"{socket.gethostname()}:{pid}:{_began(pid)}:{_pid_namespace()}"


def has_ended(agent: str) -> bool:
    """Whether the process with the id `agent` (see `launcher`) has certainly ended; False on another host."""
    return (seen := _seen(agent)) is not None and not seen


def is_at_work(agent: str) -> bool:
    """Whether the process with the id `agent` (see `launcher`) certainly runs and is not stopped (SIGSTOP)."""
    return _seen(agent) not in (None, "", "T", "t")


def _seen(agent: str) -> str | None:
    """Return the state of the process with the id `agent`; empty if it is gone, None if it cannot be seen from here."""
    host, pid, began, namespace = (agent.split(":") + [""] * 4)[:4]
    if host != socket.gethostname() or not namespace or namespace != _pid_namespace() or not pid.isdecimal():
        return None
    state, since = _state(int(pid))
    return state if since == began else ""


def _began(pid: int) -> str:
    return _state(pid)[1]


def _state(pid: int) -> tuple[str, str]:
    """Return a process's state (R, S, T...) and start time; empty if it is gone or a zombie."""
    fields = process.stat_of(pid)
    return (fields[0], fields[19]) if fields and fields[0] != "Z" else ("", "")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def asked_for(local_world_size: int) -> int | None:
    """Return the most ranks that the launcher was asked to start; an elastic job may begin with fewer. None if it does not say."""
    nodes = next(filter(None, (os.environ.get(name) for name in (NODES, "PET_NNODES", "SLURM_NNODES"))), "")
    match = re.fullmatch(r"(?:\d+:)?(\d+)", nodes)
    return int(match[1]) * local_world_size if match else None


def agents_compare_clocks() -> bool:
    """Whether agents compare clocks to detect lost agents: torchrun's do, muster/launcher/torchrun.py's do not."""
    return STEADY not in os.environ


def job() -> str:
    """Return the scheduler's id of the job, which stays the same over requeues; empty if there is no scheduler."""
    return f"slurm:{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""


def tasks_apart() -> int:
    """Return the number of tasks of the srun that started this process, if no launcher has made it a rank; else 1."""
    count = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(count) if count.isdigit() and "WORLD_SIZE" not in os.environ else 1


def record_name() -> str:
    """Return the launcher's name in a rank's records, by which `muster launch` finds its own: see `Outcome.launcher`."""
    return os.environ.get(JOB) or job() or launcher()


def job_name() -> str:
    """Return the name of this process's job, the same on all nodes and over restarts; empty if unknown.

    `muster launch` sets it. Otherwise it is torchrun's rendezvous id: agents with the same id are parts of one job.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get(JOB) or ("" if run in ("", "none") else f"torchrun:{run}")


def rendezvous_at() -> str:
    """Return the endpoint at which torchrun's agents meet, as given to this agent; empty if it cannot be seen."""
    try:
        words = (
            Path(f"/proc/{process.launcher_pid()}/cmdline").read_text(encoding="utf-8").split("\0")
            if "RANK" in os.environ
            else []
        )
    except OSError:
        words = []
    if not any(re.search(r"(^|/)torchrun(\.py)?$|^torch\.distributed\.run$", word) for word in words):
        return ""
    found = os.environ.get("PET_RDZV_ENDPOINT", "")
    for word, following in zip(words, words[1:], strict=False):
        if match := re.fullmatch(r"--rdzv[-_]endpoint(?:=(.*))?", word):
            found = following if match[1] is None else match[1]
    is_local = re.match(r"(localhost|127\.|\[?::1|$)", found)
    return f"{found} on {socket.gethostname()}" if is_local else found


def restarts_left() -> bool:
    """Whether torchrun's agent restarts its ranks if they fail now."""
    most, so_far = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return most.isdigit() and so_far.isdigit() and int(most) > int(so_far)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "") or str(default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment is not a whole number; start through torchrun") from None
