"""`muster launch COMMAND`: the commands that batch scripts, manifests and compose.yaml call.

node [overrides]       run this node's agent, as set by the environment of Slurm, Kubernetes or compose, or by NPROC
command [overrides]    print the agent's torchrun command without running it
doctor [options]       have all ranks check whether this cluster can train (muster doctor --help)
check [overrides]      print the run's folder if `python -m train` accepts the overrides; else the reason, and exit 2
store [options]        run the rendezvous store in a process of its own
plan [overrides]       for slurm/job.sh: check, then print srun's arguments as shell assignments
verdict RUN BEFORE CODE [TOLD [LOST [NODES USABLE EXCLUDED]]]    for slurm/job.sh: print the end and the next action as shell
                       assignments

In place of overrides, `-- my.py --lr 1e-3` or `-- -m package.module` runs a training script of your own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster import outcome
from muster.errors import ConfigError, Held, nearest, one_line, say
from muster.faults import lost_output
from muster.files import replace_file
from muster.launcher import bad_nodes, execute, slurm
from muster.launcher.answer import check, check_apart, give
from muster.launcher.script import Script, script_of
from muster.launcher.spec import (
    Dynamic,
    Spec,
    command,
    environment,
    for_script,
    printed,
    steady_torchrun,
    this_torchrun,
)
from muster.launcher.substrate import THIS_MACHINE, Substrate, find, here
from muster.launcher.verdict import SLURM, UNMET, before_and_after, decide, decide_script, identity
from muster.loggers import jsonl

DOCTOR_WAITS_S = 30


def node(given: Sequence[str]) -> int:
    """Run this node's agent to its end, and return the exit code for its substrate. Raises ConfigError, as all commands do."""
    kind = here(os.environ)
    spec = kind.spec(os.environ)
    overrides = kind.overrides(os.environ, given)
    if script := script_of(overrides):
        return run_script(kind, script)
    folders: list[Path] = []
    if kind.policy.checks:
        code, folders = check_apart(overrides)
        if code:
            return code
    for left in reversed(range(kind.policy.again + 1)):
        began = time.time()
        end = execute.run(spec, overrides, policy=kind.policy, folders=folders)
        if end.signals or end.verdict.code == 0 or not left or not was_held(spec, overrides, since=began):
            break
        say(f"muster: held by another part of this job: this node restarts its agent (at most {left} times)")
    verdict = end.verdict
    if verdict.line:
        say(f"muster: {common(folders)}: {verdict.line}")
    return verdict.code


def run_script(kind: Substrate, script: Script) -> int:
    script.check()
    spec = for_script(kind.spec(os.environ), os.environ)
    end = execute.run_script(spec, script, policy=kind.policy)
    if kind.end_of_script and not end.signals:
        note_end(kind.end_of_script(os.environ), script, end.verdict.code)
    if kind.policy.judges and end.verdict.line:
        say(f"muster: {script.name}: {end.verdict.line}")
    return end.verdict.code


def note_end(path: Path, script: Script, code: int) -> None:
    """Record how a script ended, for the rendezvous store, which ends then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"script": script.name, "exit_code": code, "time": round(time.time(), 3)}
    replace_file(path, lambda draft: draft.write_text(json.dumps(record) + "\n", encoding="utf-8"))


def was_held(spec: Spec, overrides: Sequence[str], *, since: float) -> bool:
    """Whether ranks of this job gave up since then, because another part of the job held their run."""
    records = [outcome.newest(folder, launcher=spec.job_name) for folder in check_apart(overrides)[1]]
    return any(
        record.get("exit_code") == Held.exit_code and float(record.get("time", 0.0)) > since for record in records
    )


def line(given: Sequence[str]) -> int:
    """Print the command that `node` would run; without a launcher's variables, that of this machine."""
    kind = find(os.environ) or THIS_MACHINE
    spec = kind.spec(os.environ)
    overrides = kind.overrides(os.environ, given)
    if script_of(overrides):
        spec = for_script(spec, os.environ)
    say(printed(spec, command(spec, overrides, torchrun=this_torchrun())), sys.stdout)
    return 0


def check_here(given: Sequence[str]) -> int:
    """Check the overrides, including those from the environment, or look for the script."""
    overrides = (find(os.environ) or THIS_MACHINE).overrides(os.environ, given)
    if script := script_of(overrides):
        script.check()
        say(script.name, sys.stdout)
        return 0
    return check(overrides)


def doctor(given: Sequence[str]) -> int:
    """Have all ranks check whether they can train, without restarts, and return torchrun's exit code."""
    kind = here(os.environ)
    spec = replace(kind.spec(os.environ), max_restarts=0)
    if isinstance(spec.rendezvous, Dynamic):  # the doctor reports missing nodes: wait for them, but not forever
        timings = replace(spec.rendezvous.timings, last_call_timeout=DOCTOR_WAITS_S)
        spec = replace(spec, rendezvous=replace(spec.rendezvous, timings=timings))
    own = kind.overrides(os.environ, ())
    words = [*([] if script_of(own) else own), *given]
    most = str(spec.nnodes).rpartition(":")[2]
    if str(spec.nproc).isdigit() and not any(word.startswith("--expect") for word in words):
        words = ["--expect", str(int(most) * int(spec.nproc)), *words]
    say(printed(spec, command(spec, words, torchrun=this_torchrun(), module="muster.train.doctor")), sys.stdout)
    if isinstance(spec.rendezvous, Dynamic) and not execute.may_meet(spec.rendezvous, port_s=DOCTOR_WAITS_S):
        return UNMET
    line = command(spec, words, torchrun=steady_torchrun(), module="muster.train.doctor")
    return subprocess.run(line, env={**os.environ, **environment(spec)}, check=False).returncode


def store(given: Sequence[str]) -> int:
    """Serve until the run has ended. The only command that imports torch."""
    from muster.launcher import store as server

    server.main(given)
    return 0


def plan(given: Sequence[str]) -> int:
    """Print what slurm/job.sh needs to start the nodes: job, run, before, srun_flags, and exports for srun."""
    flags, job = slurm.srun_flags(os.environ), slurm.job_name(os.environ)
    if note := slurm.note_of_components(os.environ):
        say(f"muster: {note}")
    if script := script_of(given):
        script.check()
        run, before = script.name, ""
    else:
        code, folders = check_apart(given)
        if code:
            return code
        were = [identity(record) for record in records_in(folders)]
        run, before = "\n".join(map(str, folders)), json.dumps(were if were[1:] else were[0])
    answer = {"job": job, "run": run, "before": before, "srun_flags": flags}
    exported = [f"export {text}" for text in slurm.assignments(slurm.srun_environment(os.environ)).splitlines()]
    give("\n".join([slurm.assignments(answer), *exported]))
    return 0


def records_in(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [outcome.newest(folder, launcher=slurm.job_id(os.environ)) for folder in folders]


def common(folders: Sequence[Path]) -> Path:
    return Path(os.path.commonpath(folders))


def verdict(given: Sequence[str]) -> int:
    """Print what slurm/job.sh does at the end: code, requeue, line, and bad, a node to exclude."""
    if len(given) not in (3, 4, 5, 8):
        raise ConfigError(
            f"verdict got {len(given)} arguments; valid: RUN BEFORE CODE [TOLD [LOST [NODES USABLE EXCLUDED]]]"
        )
    run, before, code, told, lost, nodes, usable, excluded = [*given, *[""] * 5][:8]
    folders, after = [Path(line) for line in run.splitlines()], dict[str, Any]()
    if before:
        were = json.loads(before)
        known, after = before_and_after([were] if isinstance(were, dict) else were, records_in(folders))
        end = decide(known, after, int(code), told=bool(told), policy=SLURM)
    else:  # a user's own script
        bound = slurm.requeues(os.environ)
        end = decide_script(int(code), told=bool(told), lost=lost, policy=SLURM, requeues=bound)
    bad = refused = ""
    if before and identity(known) != identity(after):
        refused = str(after.get("bad_host") or "")
    if before and (end.requeue or refused) and nodes:
        bad = bad_nodes.to_exclude(
            [event for folder in folders for event in jsonl.events(folder / jsonl.NAME)],
            nodes=nodes.split(), excluded=excluded.split(), most=slurm.most_excluded(os.environ), now=time.time(),
            usable={name: kind for name, _, kind in (line.partition(" ") for line in usable.splitlines())},
            refused=refused, so_far=slurm.requeues(os.environ).so_far,
        )  # fmt: skip
    if refused and bad:  # another start would end in the same way, but for this
        end = replace(end, requeue=True, line=f"{end.line}; without {bad} it can go on")
    answer = {
        "code": str(end.code),
        "requeue": str(int(end.requeue)),
        "line": f"{common(folders) if before else run}: {end.line}",
        "bad": bad,
    }
    give(slurm.assignments(answer))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "node": node,
    "command": line,
    "check": check_here,
    "doctor": doctor,
    "store": store,
    "plan": plan,
    "verdict": verdict,
}


def main(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ["--help"]
    if {name, *rest[:1]} & {"-h", "--help"} and name != "store":  # which has its own
        say(str(__doc__).rstrip(), sys.stdout)
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"muster launch {name} is unknown; {nearest(name, COMMANDS)}")
        return COMMANDS[name](rest)
    except ConfigError as error:
        say(f"muster: config error: {one_line(error)}")
        return error.exit_code


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
