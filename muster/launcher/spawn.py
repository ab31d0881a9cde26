"""`muster.launch(...)`: start ranks on this machine from a script or a notebook, without a launcher.

An agent (elastic.py) in a separate process starts and watches the ranks. The caller's process may lack what an agent needs:
signal handlers that torch may set, a fork without CUDA and threads, an identity that no other launch has.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, overload

from muster import outcome
from muster.errors import ConfigError, Held, MusterError, Preempted, final, of_code, one_line
from muster.launcher import loopback
from muster.launcher.spec import Spec, environment
from muster.launcher.variables import whole
from muster.launcher.verdict import Policy, decide
from muster.process import usable_processors
from muster.world.environment import JOB

T = TypeVar("T")

ECHO_S = 2.0  # for the last lines, after the agent has ended
SPAWNED = "MUSTER_SPAWNED"
"""Set for the agent and the ranks: in a module without a main guard they would launch again."""


@dataclass(frozen=True)
class Finished:
    """A finished run; `outcome` is its outcome.json."""

    folder: Path
    outcome: dict[str, Any]


@overload
def launch(what: Sequence[str], *, nproc: int | None = None, max_restarts: int = 0) -> Finished: ...
@overload
def launch(what: Callable[..., T], *args: Any, nproc: int | None = None, max_restarts: int = 0) -> list[T]: ...
def launch(what: Any, *args: Any, nproc: int | None = None, max_restarts: int = 0) -> Any:
    """Start `nproc` processes on this machine, wait for their end, and return their results.

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT, as torchrun
    would set them. No process imports `__main__` again.

    Args:
        what: overrides of a run, as after `python -m train`; then the result is the run's folder and outcome. Or a
            function, which each process calls with `args`, and which forms a process group itself if it needs one; then
            the result is each rank's return value, in rank order. Function and values are pickled by cloudpickle.
        *args: arguments of the function.
        nproc: the number of processes. None: one for each GPU; without GPUs, one for each core that this process may use.
        max_restarts: how often all processes are restarted after one has failed.

    Raises:
        MusterError: the type of the cause, with the failing rank's message in one line.
        Preempted: this process got SIGTERM; the ranks have stopped.
        KeyboardInterrupt: the same after Ctrl-C or a notebook's stop button. After a second one the ranks do not save.
    """
    _refuse_ranks()
    nproc = _devices() if nproc is None else nproc
    spec = _spec(nproc, max_restarts)
    with tempfile.TemporaryDirectory(prefix="muster-launch-") as name:
        folder = Path(name)
        overrides = None if callable(what) else _overrides(what, args)
        (folder / "job").write_bytes(pickle.dumps((spec, overrides)))
        if overrides is None:
            (folder / "call").write_bytes(_packed(what, args))
        code, came = _run_agent(spec, folder)
        end = SpawnEnd(folder, code, came)
        return end.values(nproc) if overrides is None else end.run()


def _refuse_ranks() -> None:
    if SPAWNED in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "muster.launch was called by a process that is already a rank: call it outside of torchrun, and in a module "
            'that ranks import only below `if __name__ == "__main__":`'
        )


def _devices() -> int:
    import torch  # here, so that the commands do not import it

    return torch.cuda.device_count() or len(usable_processors())


def _spec(nproc: int, max_restarts: int) -> Spec:
    for name, value, least in (("nproc", nproc, 1), ("max_restarts", max_restarts, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value} is not valid: use a whole number of at least {least}")
    threads = whole(os.environ, "OMP_NUM_THREADS", default=1, least=1)
    # The agent's store takes any free port; MASTER_PORT is a different one, which the agent finds for each attempt.
    return loopback.spec(
        "1", port=0, id=uuid.uuid4().hex, is_host=True, nproc=nproc, max_restarts=max_restarts, threads=threads
    )


def _overrides(what: Sequence[str], args: tuple[Any, ...]) -> list[str]:
    given = [what] if isinstance(what, str) else [*what, *args]
    wrong = next((text for text in given if not isinstance(text, str) or text.startswith("-")), None)
    if isinstance(what, str) or args or wrong is not None:
        raise ConfigError(
            f"{what if wrong is None else wrong!r} is not a list of overrides: give one, as ['max_steps=20'], without "
            "flags, or a function; a sweep is a loop of launches"
        )
    return given


def _packed(function: Any, args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ConfigError(
            f"{getattr(function, '__name__', function)} cannot be sent to other processes: {one_line(error)}; create what "
            "cannot be pickled (locks, open files, generators) inside it"
        ) from error
    return packed


def _run_agent(spec: Spec, folder: Path) -> tuple[int, list[int]]:
    """Return the agent's exit code as in a shell, and the signals that came meanwhile."""
    line = [sys.executable, "-P", "-m", "muster.launcher.elastic", str(folder), str(os.getpid())]
    paths = [*(os.path.abspath(path or ".") for path in sys.path), os.getcwd()]  # `-P`: find no other `muster`
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1", SPAWNED: "1"}
    shown_here = sys.stdout is not sys.__stdout__  # in a notebook or a test: processes inherit another file
    with _passing_on() as signals:
        agent = subprocess.Popen(
            line,
            env={**os.environ, **own, JOB: spec.job_name, **environment(spec)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if shown_here else None,
            stderr=subprocess.STDOUT if shown_here else None,
            start_new_session=True,  # signals to this process group reach the ranks only once, through the agent
        )
        try:
            signals.watch(agent)
            echo = threading.Thread(target=_echo, args=(agent,), daemon=True)
            echo.start()
            code = agent.wait()
            echo.join(ECHO_S)
        finally:
            _end(agent, spec.grace_s)
    return 128 - code if code < 0 else code, signals.came


def _echo(agent: subprocess.Popen[bytes]) -> None:
    with agent.stdout or contextlib.nullcontext(()) as lines:
        for line in lines:
            with contextlib.suppress(OSError):  # no reader is left: the agent must not block on a full pipe
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()


def _end(agent: subprocess.Popen[bytes], grace_s: int) -> None:
    """End the agent, if an exception cut the wait for it short."""
    if agent.poll() is None:
        agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(grace_s)
        agent.kill()
        agent.wait()


@dataclass
class _Signals:
    """The stop signals that this process has received. The agent gets SIGTERM for the first; a second Ctrl-C kills it."""

    came: list[int] = field(default_factory=list)
    agent: subprocess.Popen[bytes] | None = None

    def on(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        if self.agent and len(self.came) == 1:
            self.agent.terminate()
        elif self.agent and self.came.count(signal.SIGINT) > 1:
            self.agent.kill()  # the ranks die with it (faults/agent.py)

    def watch(self, agent: subprocess.Popen[bytes]) -> None:
        self.agent = agent
        if self.came:
            agent.terminate()


@contextlib.contextmanager
def _passing_on() -> Iterator[_Signals]:
    """Pass signals on to the agent. Outside of the main thread, Python handles none; the agent notices when this process dies."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass(frozen=True)
class SpawnEnd:
    """The agent's files in `folder`, its exit code, and the signals that came to this process."""

    folder: Path
    code: int
    came: list[int]

    def values(self, nproc: int) -> list[Any]:
        """Return each rank's value. Raises MusterError, KeyboardInterrupt."""
        self._raise_if_stopped("the function was ended: launch it again")
        self._raise_if_failed()
        return [self._value(rank) for rank in range(nproc)]

    def run(self) -> Finished:
        """Raises MusterError, KeyboardInterrupt."""
        plan = self._read("plan.json")
        if refused := plan.get("refused"):
            raise of_code(*refused)
        if "folder" not in plan:
            self._raise_if_stopped("nothing was started: launch it again")
            self._raise_if_failed()
        folder = Path(plan["folder"])
        after = outcome.newest(folder, launcher=plan["launcher"])
        verdict = decide(plan["before"], after, self.code, told=bool(self.came), policy=Policy())
        self._raise_if_stopped(f"{folder}: {verdict.line or 'done'}: launch it again to resume")
        if verdict.code == 0:
            return Finished(folder, after)
        if not (said := after.get("error")) or verdict.line.startswith("no rank"):
            self._raise_if_failed()
        who = f"rank {after.get('rank')} on {after.get('failed_host')}: " if after.get("outcome") == "failed" else ""
        raise _error(verdict.code, f"{who}{said}" if said else f"{folder}: {verdict.line}")

    def _raise_if_stopped(self, outcome: str) -> None:
        if signal.SIGINT in self.came:
            raise KeyboardInterrupt(outcome)
        if self.came:
            raise Preempted(f"stopped by {signal.Signals(self.came[0]).name}; {outcome}")

    def _raise_if_failed(self) -> None:
        if self.code:
            failure = self._read("failure.json")
            said = "the agent ended early: see its messages above"
            message = f"rank {failure['rank']}: {failure['message']}" if failure else said
            raise _error(failure.get("exit_code", self.code), message)

    def _value(self, rank: int) -> Any:
        path = self.folder / f"value-{rank}"
        return pickle.loads(path.read_bytes()) if path.exists() else None  # sys.exit(0) leaves no value

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return read


def _error(code: int, message: str) -> MusterError:
    return of_code(code, message) if code in (*final(), Held.exit_code, Preempted.exit_code) else MusterError(message)
