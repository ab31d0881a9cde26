"""A cluster of torchrun agents on loopback, for the fault tests and the benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit import warm
from kit.job import QUIET, Job, command, environment, free_port
from muster.faults.agent import terminate
from muster.launcher import loopback
from muster.launcher import spec as launch

Process = subprocess.Popen[str] | warm.Popen


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, the youngest last; none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def variable(pid: int, name: str) -> str:
    words = dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)
    return words.get(name)


def rank_of(worker: int) -> int:
    """Return the pid of the rank of torchrun's worker: if this is a supervisor, of its youngest child with a group of its own."""
    own = [child for child in children(worker) if _group_of(child) == child]
    return own[-1] if own else worker


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


class Nodes(Job):
    """The agents ("nodes") of one job. They start warm (see `kit.warm`) unless `cold`."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        nnodes: str = "1:2",
        nproc: int = 1,
        own_store: bool = True,
        cold: bool = True,
        **env: str,
    ):
        super().__init__(folder)
        self.overrides, self.nnodes, self.nproc = overrides, nnodes, nproc
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.mark = f"muster-test-{os.getpid()}-{time.monotonic_ns()}"
        self.env = environment(TEST_MARK=self.mark, **env)
        self.cold = cold or not warm.can(command(ranks=1), env)
        self.port, self.own_store = free_port(), own_store
        self.agents: list[Process] = []
        self.store: Process | None = None
        if own_store:
            self.start_store()

    def start_store(self) -> None:
        self.store = self._popen(
            [sys.executable, "-m", "train.launch", "store", "--host=127.0.0.1", "--port", str(self.port)], "store"
        )

    def start(
        self, *overrides: str, host: bool | None = None, nproc: int | None = None, max_restarts: int = 100
    ) -> Process:
        """Start one more agent. If the store is not a process of its own, the first agent is the rendezvous host."""
        is_host = (not self.agents if host is None else host) and not self.own_store
        spec = loopback.spec(
            self.nnodes, port=self.port, id="t", is_host=is_host, nproc=nproc or self.nproc, max_restarts=max_restarts
        )
        arguments = (f"output_dir={self.folder}", *QUIET, *self.overrides, *overrides)
        line = launch.command(spec, arguments, torchrun=[sys.executable, "-m", "torch.distributed.run"])
        self.env |= launch.environment(spec)
        agent = self._popen(line, f"agent-{len(self.agents)}")
        self.agents.append(agent)
        return agent

    def _popen(self, line: list[str], name: str) -> Process:
        with (self.folder.parent / f"{name}.log").open("w") as log:
            if not self.cold:
                return warm.Popen(line, env=self.env, cwd=self.folder.parent, log=Path(log.name))
            return subprocess.Popen(
                line, env=self.env, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=self.folder.parent
            )

    def workers(self, agent: Process) -> list[int]:
        """Return the pids of an agent's workers: supervisors, whose children are the ranks, or the ranks themselves."""
        return children(agent.pid)

    def ranks(self, agent: Process) -> list[int]:
        """Return the pids of the ranks of an agent."""
        return [rank_of(worker) for worker in self.workers(agent)]

    def node(self, agent: Process) -> list[int]:
        """Return the pids of an agent, its workers and its ranks."""
        workers = self.workers(agent)
        return [agent.pid, *workers, *(pid for worker in workers for pid in children(worker))]

    def tell(self, agent: Process) -> None:
        """Send SIGTERM to an agent, at a moment when torchrun can take it."""
        terminate(agent.pid)

    def kill_node(self, agent: Process) -> None:
        """Kill an agent and its workers at once, like a machine that fails: a supervisor that outlives its rank would have it restarted in
        place."""
        for pid in self.node(agent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    @property
    def log(self) -> str:
        return "\n".join(f"==== {path.name}\n{path.read_text()}" for path in sorted(self.folder.parent.glob("*.log")))

    def ended(self, *, timeout_s: float = 90) -> list[int]:
        """Return the exit codes of all agents, in the order of their start."""
        self.until(
            lambda: all(agent.poll() is not None for agent in self.agents), "end of all agents", timeout_s=timeout_s
        )
        return [agent.returncode for agent in self.agents]

    def left_over(self) -> list[int]:
        """Processes of this job that are still there, the store left out: by a mark in what they were started with, or by
        what they write to."""
        found, logs = [], str(self.folder.parent.resolve())
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    writes_here = os.readlink(entry / "fd/1").startswith(logs)
                    if stat[0] != "Z" and (writes_here or self.mark.encode() in (entry / "environ").read_bytes()):
                        found.append(int(entry.name))
        return [pid for pid in found if not self.store or pid != self.store.pid]

    def close(self) -> None:
        for _ in range(3):
            for pid in [*self.left_over(), *([self.store.pid] if self.store and self.store.poll() is None else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in [*self.agents, *([self.store] if self.store else [])]:
            process.wait()


@contextlib.contextmanager
def nodes(folder: Path, *overrides: str, **kwargs: Any) -> Iterator[Nodes]:
    cluster = Nodes(folder, *overrides, **kwargs)
    try:
        yield cluster
    finally:
        cluster.close()
