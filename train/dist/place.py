"""Where this process stands, as its launcher wrote it into the environment, and who that launcher is.

Rank arithmetic reads RANK and its kin here; a word to torchrun's agent (faults/agent.py) goes by LOCAL_RANK alone.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from train.errors import ConfigError

NODES = "MUSTER_NNODES"
"""How `python -m train.launch node` says to its ranks how many nodes (N or MIN:MAX) there are to be."""
STEADY = "MUSTER_STEADY_AGENT"
"""Set by train/launch/torchrun.py, which imports nothing of the kit."""
JOB = "MUSTER_JOB"
"""How it says which job they are parts of: the same on all nodes, and when the job is started again."""


@dataclass(frozen=True)
class Place:
    """This process's position in the job; one process alone if the launcher wrote nothing."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    shared_file: Path | None = None
    """Where the ranks meet, if `dist.init_method` says so, in place of a port of rank 0's."""

    @classmethod
    def from_env(cls, init_method: str = "env://") -> Place:
        """Raises ConfigError if a variable is not a number, only some are set, or they do not go with `init_method`."""
        if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
            raise ConfigError("only one of RANK and WORLD_SIZE is set: set both, or start through torchrun")
        rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
        shared = Path(init_method.removeprefix("file://")) if init_method.startswith("file://") else None
        if shared and "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(f"dist.init_method={init_method} is for ranks started by hand: under torchrun leave it out")
        if world_size > 1 and not shared and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
            raise ConfigError(
                f"WORLD_SIZE={world_size} needs MASTER_ADDR and MASTER_PORT: set both, start through torchrun, or give "
                "dist.init_method=file:///shared/path"
            )
        places = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), _number("GROUP_RANK", 0)
        return cls(rank, world_size, *places, shared_file=shared)

    @property
    def is_one_node(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def store_at(self) -> str:
        """Where the rendezvous store is, for a person to read."""
        return f"file://{self.shared_file}" if self.shared_file else os.environ["MASTER_ADDR"]

    @property
    def hosts_store(self) -> bool:
        """Whether the rendezvous store lives in this very process and dies with it, or is a file that this one removes."""
        return self.rank == 0 and self.world_size > 1 and not store_is_agents()


def store_is_agents() -> bool:
    """Whether torchrun's agent holds the rendezvous store; if not, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher() -> str:
    """The process that started this one and starts it again, unlike any other: host, pid, when it began, and where pids count.

    A rendezvous id does not do: people give every launch the same.
    """
    pid = os.getppid() if "RANK" in os.environ else os.getpid()
    return f"{socket.gethostname()}:{pid}:{_began(pid)}:{_pid_namespace()}"


def has_ended(agent: str) -> bool:
    """Whether the process that `launcher` named so is gone for certain; of another host's nothing is known."""
    return (seen := _seen(agent)) is not None and not seen


def is_at_work(agent: str) -> bool:
    """Whether the process that `launcher` named so is there for certain, and not stopped (SIGSTOP)."""
    return _seen(agent) not in (None, "", "T", "t")


def _seen(agent: str) -> str | None:
    """The state of the process that `launcher` named so; empty if it is gone, None if that cannot be seen from here."""
    host, pid, began, namespace = (agent.split(":") + [""] * 4)[:4]
    if host != socket.gethostname() or not namespace or namespace != _pid_namespace() or not pid.isdecimal():
        return None
    state, since = _state(int(pid))
    return state if since == began else ""


def _began(pid: int) -> str:
    """In clock ticks since boot; empty if there is no such process, or it is a zombie."""
    return _state(pid)[1]


def _state(pid: int) -> tuple[str, str]:
    """A process's state (R, S, T...) and when it began; empty if it is gone, or a zombie. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] == "Z" else (fields[0], fields[19])


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def asked_for(local_world_size: int) -> int | None:
    """The most ranks that the launcher was told to start, where its variables say so: an elastic job may begin with fewer."""
    nodes = next(filter(None, (os.environ.get(name) for name in (NODES, "PET_NNODES", "SLURM_NNODES"))), "")
    match = re.fullmatch(r"(?:\d+:)?(\d+)", nodes)
    return int(match[1]) * local_world_size if match else None


def agents_compare_clocks() -> bool:
    """Whether they tell by their clocks who is alive: torchrun's do, train/launch/torchrun.py's do not."""
    return STEADY not in os.environ


def job() -> str:
    """The scheduler's name of the job, which it keeps when it requeues it; empty if there is none."""
    return f"slurm:{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""


def record_name() -> str:
    """The launcher's name in what a rank leaves behind, by which `train.launch` knows its own: see `Attempt.launcher`."""
    return os.environ.get(JOB) or job() or launcher()


def job_name() -> str:
    """The job that this process is a part of, the same on all of its nodes and over its restarts; empty if unknown.

    `python -m train.launch` says it. Else it is torchrun's rendezvous id, where one was given: agents of one id are
    parts of one job.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get(JOB) or ("" if run in ("", "none") else f"torchrun:{run}")


def rendezvous_at() -> str:
    """The endpoint where torchrun's agents meet, as given to this one; empty if that cannot be seen."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0") if "RANK" in os.environ else []
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
    """Whether torchrun's agent starts its ranks again if they fail now."""
    most, so_far = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return most.isdigit() and so_far.isdigit() and int(most) > int(so_far)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "") or str(default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment is not a whole number; start through torchrun") from None
