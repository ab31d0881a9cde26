"""Run this node's agent to its end: print its command, pass signals on, and judge the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from muster import outcome, process
from muster.errors import ConfigError, Preempted, say
from muster.launcher.script import Script
from muster.launcher.spec import (
    MARGIN_S,
    Dynamic,
    Spec,
    command,
    environment,
    is_free,
    printed,
    steady_torchrun,
    this_torchrun,
)
from muster.launcher.verdict import UNMET, Policy, Requeues, Verdict, before_and_after, decide, decide_script
from muster.redact import redacted
from muster.world.environment import JOB, NODES

LAST_WORDS_S = MARGIN_S - 2
POLL_S = 0.2
MOST = 400  # characters of the cause in the last line
CONNECT_S, SAID_AFTER_S = 5.0, 10.0
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""One exists on a host with GPUs of NVIDIA or AMD."""
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
SCRIPT = "MUSTER_SCRIPT"
"""Variable that tells torchrun.py that the ranks run a user's own script."""
CAUSE = "MUSTER_CAUSE"
"""Variable with the file in which script_agent.py writes a rank's error."""
MEETS_AT = "MUSTER_MEETS_AT"
"""Variable with the host of the rendezvous, for script_agent.py."""
NO_HANGUP = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT"}
"""For torchrun: closing a terminal (SIGHUP) must not end the agent."""


@dataclass
class Signals:
    """The stop signals that came. The agent gets SIGTERM for the first that it did not get itself: a terminal also sends it SIGINT."""

    policy: Policy
    came: list[int] = field(default_factory=list)
    agent: subprocess.Popen[bytes] | None = None
    passed_on: bool = False

    def on(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        self.pass_on()

    def pass_on(self) -> None:
        alone = (*NOTICES, signal.SIGTERM) if self.policy.forwards_term else NOTICES
        wanted = not {*alone}.isdisjoint(self.came)
        if wanted and self.agent and not self.passed_on:
            self.passed_on = True  # a second SIGTERM makes torchrun stop waiting for its workers
            self.agent.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class AgentEnd:
    """The next action, the signals that came, and the last record of outcome.json; for a script, one like it."""

    verdict: Verdict
    signals: tuple[int, ...]
    record: dict[str, Any]


def run(spec: Spec, overrides: Sequence[str], *, policy: Policy, folders: Sequence[Path] = ()) -> AgentEnd:
    """Run the agent, and judge its end by the records in `folders`, if they are known. Raises ConfigError."""
    signals, known = _handled(policy), _records(folders, spec.job_name)
    code = _run_agent(spec, overrides, signals)
    told = bool(signals.came)
    before, after = _settled(folders, spec.job_name, known, told=told)
    if not policy.judges or not folders:
        return AgentEnd(Verdict(code, False, ""), tuple(signals.came), after)
    return AgentEnd(decide(before, after, code, told=told, policy=policy), tuple(signals.came), after)


def run_script(spec: Spec, script: Script, *, policy: Policy, requeues: Requeues | None = None) -> AgentEnd:
    """Run the agent of a user's own script, and judge its end by its exit code. Raises ConfigError."""
    signals = _handled(policy)
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        cause = Path(folder, "cause")
        code = _run_agent(spec, script.given, signals, {SCRIPT: "1", CAUSE: str(cause), **_meets_at(spec)})
        said = redacted(cause.read_text(encoding="utf-8"))[:MOST] if cause.is_file() else ""
    verdict = decide_script(code, told=bool(signals.came), said=said, policy=policy, requeues=requeues)
    word = {0: outcome.DONE, Preempted.exit_code: outcome.PREEMPTED}.get(code, "failed")
    return AgentEnd(verdict, tuple(signals.came), {"outcome": word, "exit_code": code})


def _handled(policy: Policy) -> Signals:
    signals = Signals(policy)
    for number in process.STOP_SIGNALS:
        signal.signal(number, signals.on)
    return signals


def _run_agent(spec: Spec, overrides: Sequence[str], signals: Signals, extra: Mapping[str, str] | None = None) -> int:
    if spec.numa_binding and not any(Path(each).exists() for each in GPUS):
        raise ConfigError(
            f"numa_binding={spec.numa_binding} (NUMA_BINDING) binds each process beside its GPU, and this host has none: unset it"
        )
    say(printed(spec, command(spec, overrides, torchrun=this_torchrun())), sys.stdout)
    line = command(spec, overrides, torchrun=steady_torchrun())
    env = {**NO_HANGUP, **os.environ, "PYTHONUNBUFFERED": "1", NODES: spec.nnodes, **environment(spec), **(extra or {})}
    if spec.job_name:
        env[JOB] = spec.job_name
    if isinstance(spec.rendezvous, Dynamic) and not may_meet(spec.rendezvous, port_s=spec.grace_s, came=signals.came):
        return UNMET
    if signals.came:  # no agent is there yet, to which Slurm or a terminal would have sent it, too
        return Preempted.exit_code
    signals.agent = subprocess.Popen(line, env=env, preexec_fn=_as_child)
    signals.pass_on()  # for a signal that came before the agent existed
    code = signals.agent.wait()
    return 128 - code if code < 0 else code


def _meets_at(spec: Spec) -> dict[str, str]:
    """Return the variable by which a script's agents choose the interface of their ranks. The kit's ranks choose it themselves."""
    if spec.nnodes == "1":
        return {}
    at = spec.rendezvous
    return {MEETS_AT: _address(at.endpoint)[0] if isinstance(at, Dynamic) else at.master_addr}


def may_meet(rendezvous: Dynamic, *, port_s: float, came: Sequence[int] = ()) -> bool:
    """Wait until the agent can listen at its port, or reach its host; False, with a line, if the host does not come.

    port_s: the longest wait for the port: an earlier agent that still saves may hold it.
    came: the stop signals so far; one that is added ends the wait.

    Raises ConfigError: the port stays in use.
    """
    if rendezvous.is_host:
        _await_port(rendezvous, port_s, came)
        return True
    return not rendezvous.awaits_host or _await_host(rendezvous, came)


def _await_port(rendezvous: Dynamic, longest_s: float, came: Sequence[int]) -> None:
    _, port = _address(rendezvous.endpoint)
    began, is_said = time.monotonic(), False
    used = f"port {port} of {socket.gethostname()}, at which the nodes meet, is in use by another process"
    while not is_free(port) and not came:
        if (seconds := time.monotonic() - began) > longest_s:
            raise ConfigError(
                f"{used}: give all nodes a free one in MASTER_PORT, or a PyTorchJob in elasticPolicy.rdzvPort"
            )
        if seconds > SAID_AFTER_S and not is_said:
            is_said = True
            say(f"muster: waits up to {longest_s:g} s: {used}")
        time.sleep(POLL_S)


def _await_host(rendezvous: Dynamic, came: Sequence[int]) -> bool:
    """Wait until the rendezvous host listens.

    Without the wait, nodes can miss each other for ever: torchrun tries twice for `read_timeout` and then ends, and each pod of
    an Indexed Job that ends is replaced later than the one before.
    """
    longest, listens = rendezvous.timings.join_timeout, threading.Event()
    # In a thread, as no signal interrupts a look-up of a name. It ends within seconds of the host's coming.
    asking = threading.Thread(target=_ask, args=(_address(rendezvous.endpoint), listens), name="host", daemon=True)
    asking.start()
    began, is_said = time.monotonic(), False
    while not listens.wait(POLL_S) and not came and (seconds := time.monotonic() - began) < longest:
        if seconds > SAID_AFTER_S and not is_said:
            is_said = True
            say(f"muster: waits up to {longest} s for the node that holds the rendezvous, {rendezvous.endpoint}")
    has_come = listens.is_set() or bool(came)
    if not has_come:
        say(
            f"muster: the node that holds the rendezvous, {rendezvous.endpoint}, has not come within {longest} s: see that "
            "node's log, and whether this one can reach the port"
        )
    listens.set()
    asking.join(CONNECT_S)
    return has_come


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"{host} is not a host's name ({error}): correct HEAD") from None
    return host.strip("[]"), int(port)


def _ask(at: tuple[str, int], listens: threading.Event) -> None:
    while not listens.is_set():
        with contextlib.suppress(OSError), socket.create_connection(at, timeout=CONNECT_S):
            listens.set()
        listens.wait(POLL_S)


def _as_child() -> None:
    """In the agent's process: ignore USR1 and USR2, which Slurm sends to every process; the launcher handles them."""
    process.die_with_parent()
    process.ignore(*NOTICES)


def _records(folders: Sequence[Path], launcher: str) -> list[dict[str, Any]]:
    return [outcome.newest(folder, launcher=launcher) for folder in folders]


def _settled(
    folders: Sequence[Path], launcher: str, known: Sequence[dict[str, Any]], *, told: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record before, and the last one. After a stop request, wait for a node that still has to write it."""
    deadline = time.monotonic() + (LAST_WORDS_S if told else 0)
    while (both := before_and_after(known, _records(folders, launcher)))[1].get("outcome") == outcome.RUNNING:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return both
