"""A trainer's launch as a scheduler sees it: one command and one exit code. Also finds the processes that belong to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from muster.launcher.spec import UNSHARED

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
MARK = "CONFORMANCE_RUN"
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


class Hung(Exception):
    """A launch did not reach its next event in time."""


class Launches:
    """All launches of one scenario. Their processes are found by a mark in the environment that they inherit."""

    def __init__(self, ledger: Path, log: Path, *, namespace: int | None = None):
        self.mark, self.ledger, self.log = uuid.uuid4().hex, ledger, log
        self.enter = ["nsenter", f"--target={namespace}", "--mount", "--"] if namespace else []
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, worker: Sequence[str], *, ranks: int, max_restarts: int) -> subprocess.Popen[bytes]:
        """Start torchrun on this machine; `worker` follows its own options."""
        line = [*self.enter, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        line += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", *worker]
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | OFFLINE
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Without it torchrun's own restarts meet addresses of the previous group, with any trainer: see slow restarts
        # in https://github.com/pytorch/pytorch/blob/main/torch/distributed/elastic/rendezvous/api.py (share_store).
        environment |= UNSHARED
        environment |= {"LEDGER": str(self.ledger), MARK: self.mark}
        with self.log.open("ab") as log:
            process = subprocess.Popen(line, env=environment, cwd=self.log.parent, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def kill(self) -> None:
        """Send SIGKILL to every process of every launch: agents, ranks, loader workers."""
        while alive := list(marked(self.mark)):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.poll()
            time.sleep(POLL_S)

    def codes(self) -> list[int | None]:
        """Return the exit codes in the order of the launches; None for a launch that was killed."""
        return [None if code is not None and code < 0 else code for code in (each.poll() for each in self.started)]


def marked(mark: str) -> Iterator[int]:
    """Return the processes whose environment has the mark, without zombies."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def until(condition: Callable[[], object], what: str, *, limit_s: float) -> None:
    """Wait for `condition`. Raises Hung."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise Hung(f"no {what} within {limit_s:g} s")
        time.sleep(POLL_S)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[tuple[int, Path]]:
    """Mount a tmpfs at `place` in a new mount namespace; return its holder's pid and the command that enters it."""
    place.mkdir()
    script = f'mount -t tmpfs -o size={size} tmpfs "$1" && echo ready && exec sleep infinity'
    line = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(place)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as holder:
        try:
            if not holder.stdout or holder.stdout.readline() != b"ready\n":
                raise PermissionError("a mount namespace of its own needs root: leave the fault `full` out")
            yield holder.pid, Path(f"/proc/{holder.pid}/root{place}")
        finally:
            holder.kill()


def fill(folder: Path) -> None:
    """Fill the disk of `folder` completely."""
    for size in (65536, 4096, 1):
        with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
            while shutil.disk_usage(folder).free:
                file.write(bytes(size))
