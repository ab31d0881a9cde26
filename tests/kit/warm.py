"""Processes that are forked from one that has imported everything, which saves the seconds of the imports.

A rank spends 3 CPU seconds on imports, a torchrun agent 2, and the suite starts thousands of them. Only the imports are
shared: each rank and each agent is a separate process, an agent's ranks are its children, and all can be killed as
usual.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from kit.stacks import stacks

PRELOADED = [
    "muster.train.run", "muster.job.job", "muster.train.strategies.ddp", "muster.train.strategies.fsdp", "muster.train.strategies.pipeline", "muster.train.strategies.zero",
    "muster.train.strategies.local_sgd", "muster.train.strategies.tensor_parallel", "muster.train.strategies.rpc.ddp_rpc", "muster.train.models.gpt",
    "torch._dynamo", "torch.distributed.elastic", "torchvision.transforms.v2", "sklearn.datasets", "rich.progress",
    "tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2", "torch.utils.tensorboard.summary",
    "torch.distributed.run", "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.elastic.agent.server.local_elastic_agent", "kit.frozen",
]  # fmt: skip
READ_AT_IMPORT = ("PYTHON", "ATEN_", "OMP_", "MKL_", "TORCH", "CUDA")
"""Variables whose names begin so are for a process of its own to read."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Call a function of a module in a new process."""
    # libgomp reads the first once, in the process that is forked; there `kit` is imported by the second
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).parent.parent)):
        process = context.Process(target=function, args=args, daemon=True)  # it ends with the tests
        process.start()
    return process


def cpu_s() -> float:
    """Return the CPU seconds of this process, of the one that has imported everything, and of all children that have ended."""
    warm = f"/proc/{forkserver._forkserver._forkserver_pid}/stat"  # type: ignore[attr-defined]
    stat = Path(warm).read_text().rpartition(")")[2].split()[11:15] if os.path.exists(warm) else []
    return sum(os.times()[:4]) + sum(map(int, stat)) / os.sysconf("SC_CLK_TCK")


class Popen:
    """Runs `python -m MODULE ARGUMENTS` with the interface of `subprocess.Popen`; its output goes to files, by default to one."""

    def __init__(
        self,
        line: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path | None = None,
        errors: Path | None = None,
    ):
        self.args, self.returncode, self._kept = line, None, log
        if log is None:
            handle, path = tempfile.mkstemp()
            os.close(handle)
            log = Path(path)
        self.log = log
        self._process = start(_begin, list(line[2:]), dict(env), str(cwd), str(log), str(errors or log))
        assert self._process.pid
        self.pid: int = self._process.pid

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; return the output."""
        self.wait(timeout)
        return self.log.read_text(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self._kept is None:
            self.log.unlink(missing_ok=True)


def can(line: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether `Popen` can run the command: it runs Python, and its environment sets nothing that imports read."""
    return list(line[:2]) == [sys.executable, "-m"] and not any(name.startswith(READ_AT_IMPORT) for name in env)


def run(
    arguments: list[str], environments: list[dict[str, str]], *, cwd: Path, timeout_s: float, module: str = "train"
) -> tuple[int, str]:
    """Run `python -m MODULE ARGUMENTS` once per environment; return the first nonzero exit code, and the output."""
    handle, log = tempfile.mkstemp()
    os.close(handle)
    line = [sys.executable, "-m", module, *arguments]
    ranks = [Popen(line, env=env, cwd=cwd, log=Path(log)) for env in environments]
    deadline = time.monotonic() + timeout_s
    try:
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        said = Path(log).read_text()
        assert all(rank.poll() is not None for rank in ranks), f"no end within {timeout_s} s:\n{said}\n{stacks()}"
        return next((rank.returncode for rank in ranks if rank.returncode), 0), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        Path(log).unlink()


def completed(
    line: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` as `subprocess.run` does with captured output."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        for file in (out, errors):
            file.touch()
        process = Popen(line, env=env, cwd=cwd, log=out, errors=errors)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(line), code, out.read_text(), errors.read_text())


def _begin(line: list[str], env: dict[str, str], cwd: str, log: str, errors: str) -> None:
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    multiprocessing.set_start_method("fork", force=True)  # the default on Linux; it has inherited the server's
    for stream, file in ((1, log), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    if line[0] == "torch.distributed.run":
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = _fork  # type: ignore[method-assign]
        inspect.stack = _stack
    try:
        _module(line, env)
    except Exception as error:  # as in a Python that was started with this command
        below = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        traceback.print_exception(error.with_traceback(below))
        sys.exit(1)


def _module(line: list[str], env: Mapping[str, str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = ["", *env.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = line
    if line[0] == "torch.distributed.run":
        sys.modules[line[0]].main()
    elif line[0].endswith(".py"):
        sys.path[0] = os.path.dirname(os.path.abspath(line[0]))
        runpy.run_path(line[0], run_name="__main__")
    else:
        runpy.run_module(line[0], run_name="__main__", alter_sys=True)


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Return the callers, without their sources: an agent asks for the names alone, a dozen times, and all modules are read."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return [
        inspect.FrameInfo(each, each.f_code.co_filename, each.f_lineno, each.f_code.co_name, None, None)
        for each in frames
    ]


_whole_stack = inspect.stack
_gate: list[int] = []
"""A pipe, from the fork of an agent's first rank to that of its last one."""


def _fork(self: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Fork a rank in an agent; it behaves like a child of `subprocess.Popen`."""
    python, *rest = args
    assert python == sys.executable and rest[0] == "-u", args
    child = subprocess.Popen.__new__(subprocess.Popen)
    vars(child).update(
        args=args, returncode=None, stdin=None, stdout=None, stderr=None, _child_created=True, _waitpid_lock=threading.Lock()
    )  # fmt: skip
    # No rank may run before all are forked: it connects to the agent's store, whose thread then looks up a name, under a lock of
    # the C library that a rank forked meanwhile would wait for without end.
    if not _gate:
        _gate.extend(os.pipe())
    child.pid = os.fork()
    if child.pid == 0:
        _become(self, rest[1 + (rest[1] == "-m") :], env)
    if int(env["LOCAL_RANK"]) + 1 == int(env["LOCAL_WORLD_SIZE"]):
        for handle in _gate:
            os.close(handle)
        _gate.clear()
    return child


def _become(handler: Any, line: list[str], env: dict[str, str]) -> NoReturn:
    code = 1
    inspect.stack = _whole_stack
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, file in ((1, handler._stdout), (2, handler._stderr)):
            if file:
                os.dup2(file.fileno(), stream)
        kept = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}  # type: ignore[attr-defined]
        for handle in (
            {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, _gate[0]} - kept
        ):  # the agent's connections are its own
            with contextlib.suppress(OSError):
                os.close(handle)
        os.read(_gate[0], 1)  # until the agent closes its end
        os.close(_gate[0])
        _module(line, env)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
