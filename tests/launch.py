"""Helpers that go through the front door: real processes, the real command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
QUIET = ("log.tensorboard=false", "log.report=false", "log.every_steps=1")


@dataclass
class Result:
    """A finished launch and what it left behind."""

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
    def said(self) -> list[str]:
        """The lines that the kit itself printed about an error."""
        return [line for line in self.out.splitlines() if line.startswith("muster: ")]


def command(*overrides: str, ranks: int | None, torchrun: Sequence[str] = (), module: str = "train") -> list[str]:
    """The command line for `ranks` processes under torchrun, or for this one process if None."""
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
    **popen: Any,
) -> subprocess.Popen[str]:
    """Start a run in `folder` and come back at once."""
    line = command(
        f"output_dir={folder}", *(QUIET if quiet else ()), *overrides, ranks=ranks, torchrun=torchrun, module=module
    )
    return subprocess.Popen(
        line,
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **{"cwd": folder.parent, **popen},
    )


def finish(process: subprocess.Popen[str], folder: Path, *, timeout_s: float = 120) -> Result:
    started = time.monotonic()
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{out}") from None
    return Result(process.returncode, out, folder, time.monotonic() - started)


def run(
    folder: Path, *overrides: str, ranks: int | None = None, ok: bool = True, timeout_s: float = 120, **kwargs: Any
) -> Result:
    """A run from start to end; asserts that it ended well unless told otherwise."""
    result = finish(start(folder, *overrides, ranks=ranks, **kwargs), folder, timeout_s=timeout_s)
    assert not ok or result.code == 0, result.out
    return result


def wait_for(
    folder: Path, condition: Callable[[Result], Any], *, process: subprocess.Popen[str], timeout_s: float = 60
) -> None:
    """Until `condition` holds of what the run has written so far."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists():
            try:
                if condition(Result(0, "", folder, 0)):
                    return
            except ValueError:
                pass  # caught a line half written
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the run never came so far:\n{process.communicate()[0]}")


def reached(step: int) -> Callable[[Result], bool]:
    return lambda result: any(line["step"] >= step for line in result.lines("train"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in `ranks` fresh processes that find RANK and its kin set; one value a rank."""
    context = mp.get_context("spawn")
    port, queue = free_port(), context.Queue()
    processes = [
        context.Process(target=_on_rank, args=(queue, function, args, rank, ranks, port)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    values = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=30)
    failures = [text for text in (values[rank][1] for rank in range(ranks)) if text]
    assert not failures, "\n".join(failures)
    return [values[rank][0] for rank in range(ranks)]


def _on_rank(queue: Any, function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, port: int) -> None:
    import traceback

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        queue.put((rank, (function(*args), None)))
    except BaseException:
        queue.put((rank, (None, f"rank {rank}:\n{traceback.format_exc()}")))
