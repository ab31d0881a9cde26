"""Run this node's agent to its end: print its command, pass signals on, and judge the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from muster import attempts, process
from muster.dist.place import JOB, NODES
from muster.errors import ConfigError, Preempted, say
from muster.launcher.script import Script
from muster.launcher.spec import MARGIN_S, Spec, command, environment, printed, steady_torchrun, this_torchrun
from muster.launcher.verdict import Policy, Requeues, Verdict, decide, decide_script

LAST_WORDS_S = MARGIN_S - 2
POLL_S = 0.2
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""What a host with GPUs of NVIDIA or AMD has."""
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
SCRIPT = "MUSTER_SCRIPT"
"""Variable that tells torchrun.py that the ranks run a user's own script; that file imports nothing of the kit."""
NO_HANGUP = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT"}
"""For torchrun: closing a terminal (SIGHUP) must not end the agent."""


@dataclass
class Signals:
    """The stop signals that this launcher has received.

    Passes the first on to the agent as SIGTERM, unless the agent got SIGTERM itself.
    """

    policy: Policy
    came: list[int] = field(default_factory=list)
    agent: subprocess.Popen[bytes] | None = None
    passed_on: bool = False

    def on(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.came.append(number)
        self.pass_on()

    def pass_on(self) -> None:
        """Send SIGTERM to the agent, once, if a signal that it did not get itself has come."""
        alone = (*NOTICES, signal.SIGTERM) if self.policy.forwards_term else NOTICES
        wanted = not {*alone}.isdisjoint(self.came)
        if wanted and self.agent and not self.passed_on:
            self.passed_on = True  # a second SIGTERM makes torchrun stop waiting for its workers
            self.agent.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class AgentEnd:
    """The next action, the signals that came, and the last record of outcome.json, or one like it for a script."""

    verdict: Verdict
    signals: tuple[int, ...]
    record: dict[str, Any]


def run(spec: Spec, overrides: Sequence[str], *, policy: Policy, folder: Path | None = None) -> AgentEnd:
    """Start the agent, wait for it, and judge its end by the records in `folder`, if `folder` is known. Raises ConfigError."""
    signals = _handled(policy)
    before = attempts.newest(folder, launcher=spec.job_name) if folder else {}
    code = _run_agent(spec, overrides, signals)
    told = bool(signals.came)
    after = _settled(folder, spec.job_name, told=told) if folder else {}
    if not policy.judges or folder is None:
        return AgentEnd(Verdict(code, False, ""), tuple(signals.came), after)
    return AgentEnd(decide(before, after, code, told=told, policy=policy), tuple(signals.came), after)


def run_script(spec: Spec, script: Script, *, policy: Policy, requeues: Requeues | None = None) -> AgentEnd:
    """Start the agent of a user's own script, wait for it, and judge its end by its exit code. Raises ConfigError."""
    signals = _handled(policy)
    code = _run_agent(spec, script.given, signals, {SCRIPT: "1"})
    verdict = decide_script(code, told=bool(signals.came), policy=policy, requeues=requeues)
    outcome = {0: attempts.DONE, Preempted.exit_code: attempts.PREEMPTED}.get(code, "failed")
    return AgentEnd(verdict, tuple(signals.came), {"outcome": outcome, "exit_code": code})


def _handled(policy: Policy) -> Signals:
    """Handle the signals that ask this launcher to stop. A terminal also sends SIGINT to the agent itself."""
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
    signals.agent = subprocess.Popen(line, env=env, preexec_fn=_as_child)
    signals.pass_on()  # for a signal that came before the agent existed
    code = signals.agent.wait()
    return 128 - code if code < 0 else code


def _as_child() -> None:
    """In the agent's process: die with the launcher, and ignore USR1 and USR2.

    Slurm sends USR1 and USR2 to every process; the launcher handles them.
    """
    process.die_with_parent()
    process.ignore(*NOTICES)


def _settled(folder: Path, launcher: str, *, told: bool) -> dict[str, Any]:
    """Return the last record. After a stop request, wait for another node that stops later and still has to write it."""
    deadline = time.monotonic() + (LAST_WORDS_S if told else 0)
    while (record := attempts.newest(folder, launcher=launcher)).get("outcome") == attempts.RUNNING:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return record
