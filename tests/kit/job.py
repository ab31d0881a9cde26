"""A run by its command line: real processes, and the files that the run leaves."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit import warm
from kit.ports import free_port
from kit.stacks import stacks
from kit.until import until

ROOT = Path(__file__).resolve().parent.parent.parent
QUIET = ("log.tensorboard=false", "log.report=false", "log.every_steps=1")


@dataclass
class Result:
    """A finished launch and its files."""

    code: int
    out: str
    folder: Path
    seconds: float

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == kind]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("event") if line["event"] == name]

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("train")}

    @property
    def outcome(self) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads((self.folder / "outcome.json").read_text())
        return outcome

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(self.folder / "model.pt", weights_only=True)
        return weights

    @property
    def sha256(self) -> str:
        """SHA-256 of model.pt."""
        return hashlib.sha256((self.folder / "model.pt").read_bytes()).hexdigest()

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The `train` and `eval` lines without the speed."""
        lines = (line for line in self.metrics if line["kind"] != "event")
        return [{key: value for key, value in line.items() if key != "samples_per_s"} for line in lines]

    @property
    def said(self) -> list[str]:
        """The lines that the kit printed about an error."""
        return [line for line in self.out.splitlines() if line.startswith("muster: ")]


def pace(step_s: float) -> tuple[str, ...]:
    """Return overrides that make each step last `step_s` longer, so that the run does not end before the test disturbs it."""
    return ("+callbacks.pace._target_=kit.parts.callbacks.Pace", f"+callbacks.pace.step_s={step_s}")


def command(*overrides: str, ranks: int | None, torchrun: Sequence[str] = (), module: str = "train") -> list[str]:
    """Return the command line for `ranks` processes under torchrun, or for one process without it if None."""
    python = [sys.executable, "-m"]
    if ranks is not None:
        python += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *torchrun, "-m"]
    return [*python, module, *overrides]


def environment(**extra: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def start(
    folder: Path,
    *overrides: str,
    ranks: int | None = None,
    torchrun: Sequence[str] = (),
    env: dict[str, str] | None = None,
    quiet: bool = True,
    module: str = "train",
    cold: bool = False,
    **popen: Any,
) -> subprocess.Popen[str] | warm.Popen:
    """Start a run in `folder` and return at once. The run starts warm (see `kit.warm`) unless `cold`."""
    line = command(
        f"output_dir={folder}", *(QUIET if quiet else ()), *overrides, ranks=ranks, torchrun=torchrun, module=module
    )
    if not cold and warm.can(line, env or {}) and not popen.keys() - {"cwd"}:
        return warm.Popen(line, env=environment(**(env or {})), cwd=popen.get("cwd", folder.parent))
    return subprocess.Popen(
        line,
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **{"cwd": folder.parent, **popen},
    )


def evaluated(folder: Path, *arguments: str, ranks: int | None = None) -> dict[str, Any]:
    """Return what `muster evaluate` says of the run in `folder`."""
    launcher = [] if ranks is None else ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    line = [sys.executable, "-m", *launcher, "muster.train.evaluate", str(folder), "--json", *arguments]
    done = warm.completed(line, env=environment(), cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def on_nodes(
    module: str, *words: str, folders: Sequence[Path], env: dict[str, str] | None = None, restarts: int = 0
) -> list[subprocess.Popen[str] | warm.Popen]:
    """Start a torchrun agent of one rank in each folder, as nodes that meet by a static rendezvous. Warm if it can be."""
    meet = (f"--nnodes={len(folders)}", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    how = (*meet, "--nproc-per-node=1", f"--max-restarts={restarts}")
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = [[sys.executable, "-m", "torch.distributed.run", *how, f"--node-rank={at}"] for at in range(len(folders))]
    begin = warm.Popen if warm.can(lines[0], env or {}) else partial(subprocess.Popen, **pipe)
    return [
        begin([*line, "-m", module, *words], env=environment(**(env or {})), cwd=folder)
        for line, folder in zip(lines, folders, strict=True)
    ]


def finish(process: subprocess.Popen[str] | warm.Popen, folder: Path, *, timeout_s: float = 120) -> Result:
    started = time.monotonic()
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        where = stacks()
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{out}\n{where}") from None
    return Result(process.returncode, out, folder, time.monotonic() - started)


def run(
    folder: Path,
    *overrides: str,
    ranks: int | None = None,
    ok: bool = True,
    timeout_s: float = 120,
    cold: bool = False,
    **kwargs: Any,
) -> Result:
    """Run from start to end; unless `ok` is false, assert that it succeeded.

    The run starts warm (see `kit.warm`) unless `cold`. With `ranks` the processes start without torchrun, unless an
    argument needs it.
    """
    env = kwargs.get("env") or {}
    launched = (ranks is not None and not ok) or kwargs.keys() - {"env", "cwd"}
    if cold or launched or not warm.can(command(ranks=ranks), env):
        result = finish(start(folder, *overrides, ranks=ranks, cold=cold, **kwargs), folder, timeout_s=timeout_s)
        assert not ok or result.code == 0, result.out
        return result
    began = time.monotonic()
    line = [f"output_dir={folder}", *QUIET, *overrides]
    places = [{}] if ranks is None else by_hand(ranks)
    cwd = kwargs.get("cwd", folder.parent)
    code, out = warm.run(line, [environment(**env, **each) for each in places], cwd=cwd, timeout_s=timeout_s)
    assert code == 0 or not ok, out
    return Result(code, out, folder, time.monotonic() - began)


def by_hand(ranks: int) -> list[dict[str, str]]:
    """Return the environment (RANK, ...) of each of `ranks` processes on this host."""
    one = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [{"RANK": rank, "LOCAL_RANK": rank, **one} for rank in range(ranks)]
    return [{name: str(value) for name, value in place.items()} for place in places]


def wait_for(
    folder: Path,
    condition: Callable[[Result], Any],
    *,
    process: subprocess.Popen[str] | warm.Popen,
    timeout_s: float = 60,
) -> None:
    """Wait until `condition` is true of the run's files."""

    def holds() -> bool:
        assert process.poll() is None, process.communicate()[0]
        with contextlib.suppress(OSError, ValueError):  # not there yet, or a line half written
            return bool(condition(Result(0, "", folder, 0)))
        return False

    def give_up() -> str:
        process.kill()
        return process.communicate()[0]

    until(holds, "run that came so far", timeout_s=timeout_s, said=give_up)


def reached(step: int) -> Callable[[Result], bool]:
    return lambda result: any(line["step"] >= step for line in result.lines("train"))


def saved(step: int) -> Callable[[Result], bool]:
    """Whether a checkpoint of `step` or later is committed; training may be some steps further by then."""
    return lambda result: any(line["step"] >= step for line in result.events("checkpoint"))


def hold(step: int, *, until: Path | str | None = None) -> tuple[str, ...]:
    """Return overrides that have the run stand after `step` until it is killed, told to stop, or there is a file `until`.

    However long the test is kept waiting, it then finds the run where it wants it.
    """
    file = [f"+callbacks.hold.until={until}"] if until else []
    return ("+callbacks.hold._target_=kit.parts.callbacks.Hold", f"+callbacks.hold.step={step}", *file)


class Job:
    """A run in progress, seen through its files. The subclass of each substrate adds its faults."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def log(self) -> str:
        """Output of its processes, for the message of a failed test."""
        return ""

    def result(self, code: int = 0) -> Result:
        return Result(code, self.log, self.folder, 0)

    def lines(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl so far."""
        with contextlib.suppress(OSError):
            return [
                json.loads(text) for text in (self.folder / "metrics.jsonl").read_text().splitlines() if _whole(text)
            ]
        return []

    def step(self) -> int:
        """The last step in metrics.jsonl; 0 if there is none."""
        with contextlib.suppress(OSError, IndexError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = [text for text in file.read().splitlines()[:-1] if text.startswith(b'{"kind": "train"')]
            return int(json.loads([text for text in lines if text.endswith(b"}")][-1])["step"])
        return 0

    def attempts(self) -> list[dict[str, Any]]:
        """The `start` and `resume` events so far."""
        return [line for line in self.lines() if line.get("event") in ("start", "resume")]

    def world_size(self) -> int:
        """World size of the newest attempt; 0 if there is none."""
        return int((self.attempts() or [{"world_size": 0}])[-1]["world_size"])

    def until(self, condition: Callable[[], Any], what: str, *, timeout_s: float = 150, every_s: float = 0.02) -> float:
        """Wait until `condition` is true; return the seconds."""

        def said() -> str:
            return f"at step {self.step()}\n{self.log[-8000:]}"

        return until(condition, what, timeout_s=timeout_s, every_s=every_s, said=said)

    def reach(self, step: int, *, timeout_s: float = 150) -> float:
        return self.until(lambda: self.step() >= step, f"step {step}", timeout_s=timeout_s)

    def gather(self, ranks: int = 2, *, timeout_s: float = 150) -> float:
        """Wait until `ranks` ranks are at work, with slow steps: the run must not end before late ones came."""
        self.pace(3)
        try:
            return self.until(lambda: self.world_size() >= ranks, f"{ranks} ranks at work", timeout_s=timeout_s)
        finally:
            self.pace(0.1)

    def pace(self, seconds: float) -> None:
        """Say how long a step takes from now on, to kit.parts' models.Paced and callbacks.Pace, and the newcomer's loop."""
        new = self.folder.parent / "pace.new"
        new.write_text(str(seconds))
        new.replace(self.folder.parent / "pace")

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Let each step take a second in the block: the run must not end before the test has disturbed it."""
        self.pace(1)
        yield
        self.pace(0.05)

    def next_step(self, fault: Callable[[], Any], *, timeout_s: float = 150) -> float:
        """Cause `fault`; return the seconds to the first step of an attempt that began after it."""
        before = len(self.attempts())
        began = time.monotonic()
        fault()
        self.until(lambda: len(self.attempts()) > before, "new attempt", timeout_s=timeout_s)
        at = self.attempts()[-1]["step"]
        self.until(lambda: self.step() > at, f"step after {at}", timeout_s=timeout_s)
        return time.monotonic() - began


def _whole(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(json.loads(text))
    return False
