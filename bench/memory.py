"""Measure the memory of a rank under each strategy, in processes of its own.

`python -m bench.memory ddp fsdp zero hybrid,shard=2 --nproc 4 --set "model=mlp model.hidden=[1024]"` prints one line of
JSON per strategy: the memory in MB of the rank that needs most. Not for strategies with a server.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from bench.steps import WORKLOAD, Steps, held, launch, overrides, size_of


def weigh(strategy: str, workload: list[str]) -> None:
    """Train a few steps; rank 0 prints the largest memory of a rank in MB. Collective: every rank must call it."""
    Steps(*overrides(strategy), steps=1).losses()  # form the group and import the modules with a small model
    before = _reset_peak()
    steps = Steps(*workload, *overrides(strategy), steps=4)
    found: dict[str, int] = {}
    optimizer = steps.strategy.optimizer_step.optimizer  # type: ignore[attr-defined]
    parameters = steps.strategy.optimizer_step.parameters  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients=size_of(p.grad for p in parameters)))
    turn = iter(steps)
    next(turn)
    found["peak_rss_to_first_step"] = _status("VmHWM") - before
    before_more = _reset_peak() - before
    for _ in turn:
        pass
    found["rss"], found["peak_rss_in_steps"] = before_more, _status("VmHWM") - before
    most = [max(each[name] for each in steps.world.gather({**held(steps.strategy), **found})) for name in _names(found)]
    if steps.world.is_first:
        print(
            json.dumps({f"{name}_mb": round(value / 1e6, 1) for name, value in zip(_names(found), most, strict=True)})
        )


def _names(found: dict[str, int]) -> list[str]:
    return ["parameters", "optimizer", *sorted(found)]


def _status(field: str) -> int:
    text = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(text.split()[1]) * 1024


def _reset_peak() -> int:
    """Reset the peak of resident memory; return the present value in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("strategies", nargs="+", help="names, with options after commas")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--set", default=WORKLOAD, help=f"what is trained (default: {WORKLOAD})")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        weigh(given.strategies[0], [*given.set.split(), f"output_dir={tempfile.gettempdir()}/unused"])
        os._exit(0)  # like the kit: torch's threads may abort during teardown
    for name in given.strategies:
        weighed = launch(given.nproc, "bench.memory", "--worker", name, f"--set={given.set}")
        print(json.dumps({"strategy": name, "ranks": given.nproc, **weighed}), flush=True)


if __name__ == "__main__":
    main()
