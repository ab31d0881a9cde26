"""The agent of `muster.launch(...)`, on torch's elastic launch API: `python -m muster.launcher.elastic FOLDER PARENT`.

FOLDER holds the files that spawn.py left; the agent and the ranks add plan.json, failure.json and value-RANK for it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from muster import outcome, process
from muster.faults import lost_output
from muster.launcher.answer import answer
from muster.launcher.spec import Dynamic, Spec
from muster.launcher.torchrun import take_signals_between_looks
from muster.launcher.verdict import identity
from muster.world.environment import JOB


def main(given: list[str]) -> int:
    folder, parent = Path(given[0]), int(given[1])
    process.die_with_parent(signal.SIGTERM, parent=parent)  # no process remains, however the caller dies
    spec, overrides = pickle.loads((folder / "job").read_bytes())
    if overrides is None:
        line = ["muster.launcher.rank", str(folder)]
    else:
        plan = plan_of(overrides)
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        if "refused" in plan:
            return 2
        line = ["muster", *overrides]
    return run(spec, ["-P", "-m", *line], folder)


def plan_of(overrides: list[str]) -> dict[str, Any]:
    found = answer(overrides)
    if "refused" in found:
        return found
    folder, own = Path(found["folder"]), os.environ[JOB]
    return {"folder": str(folder), "launcher": own, "before": identity(outcome.newest(folder, launcher=own))}


def run(spec: Spec, line: list[str], folder: Path) -> int:
    """Run an agent whose ranks run Python with the arguments `line`. Return the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    assert isinstance(spec.rendezvous, Dynamic)
    fewest, _, most = spec.nnodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(fewest),
        max_nodes=int(most or fewest),
        nproc_per_node=int(spec.nproc),
        max_restarts=spec.max_restarts,
        run_id=spec.rendezvous.id,
        rdzv_backend="c10d",
        rdzv_endpoint=spec.rendezvous.endpoint,
        rdzv_configs={"is_host": int(spec.rendezvous.is_host), **vars(spec.rendezvous.timings)},
        local_addr=spec.local_addr,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    take_signals_between_looks()
    try:
        elastic_launch(config, sys.executable)(*line)
        return 0
    except ChildFailedError as error:
        code, failures = 1, error.failures
    except SignalException as error:  # from the caller, or from a rank that a restart cannot help (faults/agent.py)
        code, failures = 128 + int(error.sigval), {}
    process.ignore(signal.SIGTERM)
    (folder / "failure.json").write_text(json.dumps(first(failures, folder)), encoding="utf-8")
    return code


def first(failures: dict[int, Any], folder: Path) -> dict[str, Any]:
    """Return the first cause: a killed rank leaves no message, and those of the others are consequences."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the agent ends the other ranks by SIGTERM
            return {"rank": rank, "exit_code": 1, "message": f"killed by {failure.signal_name()}"}
    if said := [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failed-*")]:
        return dict(min(said, key=lambda each: each["time"]))
    for rank, failure in sorted(failures.items()):
        message = failure.message["message"] if isinstance(failure.message, dict) else "gave no reason"
        return {"rank": rank, "exit_code": failure.exitcode, "message": f"{message} (exit code {failure.exitcode})"}
    return {}


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
