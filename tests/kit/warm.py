"""Processes that fork from one that has imported everything: what a rank does, without the seconds before it starts.

A rank spends 3 CPU seconds on imports, and the suite starts thousands. How a process comes up and goes down under its
launcher is for the tests that start one (`job.start`); those of what is computed can do without.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "train.run", "train.strategies.ddp", "train.strategies.fsdp", "train.strategies.pipeline", "train.strategies.zero",
    "train.strategies.local_sgd", "train.strategies.tensor_parallel", "train.strategies.ddp_rpc", "train.models.gpt",
    "torch._dynamo", "torch.distributed.elastic", "torchvision.transforms.v2", "sklearn.datasets", "rich.progress",
]  # fmt: skip

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Call a function of a module in a process of its own."""
    kept = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # libgomp reads it once, in the process that they fork from
    try:
        process = context.Process(target=function, args=args)
        process.start()
    finally:
        os.environ.pop("OMP_NUM_THREADS") if kept is None else os.environ.update(OMP_NUM_THREADS=kept)
    return process


def run(arguments: list[str], environments: list[dict[str, str]], *, cwd: Path, timeout_s: float) -> tuple[int, str]:
    """`python -m train ARGUMENTS` in a process for each environment; the first exit code that is not 0, and the output."""
    handle, log = tempfile.mkstemp()
    os.close(handle)
    processes = [start(_main, arguments, env, str(cwd), log) for env in environments]
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        said = Path(log).read_text()
        assert all(process.exitcode is not None for process in processes), f"no end within {timeout_s} s:\n{said}"
        return next((process.exitcode for process in processes if process.exitcode), 0), said
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        Path(log).unlink()


def _main(arguments: list[str], env: dict[str, str], cwd: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = ["", *env.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = ["train", *arguments]
    runpy.run_module("train", run_name="__main__", alter_sys=True)
