"""`python -m bench.conformance`: inject the same faults into every installed trainer and write a matrix of the results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.conformance.comparison import judge, reference_of
from bench.conformance.faults import FAULTS, Scene, play
from bench.conformance.matrix import Results, cell, matrix
from bench.conformance.trainers import NAMES, trainer
from bench.conformance.trainers.base import Trainer


def column(chosen: Trainer, faults: list[str], *, place: Path, seed: int, limit_s: float) -> dict[str, Any]:
    """Return one trainer's raw results by fault title. The same seed gives every trainer the same faults."""
    undisturbed = Scene(chosen, place / "reference", random.Random(seed), limit_s)
    play(undisturbed, FAULTS["none"])
    reference = reference_of(undisturbed)
    results = {}
    for name in faults:
        fault, scene = FAULTS[name], Scene(chosen, place / name, random.Random(f"{seed}/{name}"), limit_s)
        play(scene, fault)
        results[fault.title] = judge(scene, fault, reference)
        print(f"  {fault.title}: {cell(results[fault.title])}", flush=True)
    return results


def names(valid: tuple[str, ...]) -> Any:
    """Return an argparse type: a comma-separated selection of `valid`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := [name for name in chosen if name not in valid]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(valid)}")
        return chosen

    return parse


def possible(faults: list[str]) -> list[str]:
    """Return the faults that this user has the rights to inject."""
    if "full" in faults and os.geteuid() != 0:
        print(f"{FAULTS['full'].title}: left out, a small disk in a mount namespace needs root", flush=True)
    return [name for name in faults if name != "full" or os.geteuid() == 0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.conformance", description=__doc__)
    parser.add_argument("--only", type=names(NAMES), default=[*NAMES], help=f"of {','.join(NAMES)}; default: all")
    parser.add_argument("--faults", type=names(tuple(FAULTS)), default=[*FAULTS], help=f"of {','.join(FAULTS)}")
    parser.add_argument("--json", type=Path, default=Path("runs/conformance.json"), help="where the raw results go")
    parser.add_argument(
        "--limit-s", type=float, default=90.0, help="without an event for so long a launch is called hung"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here, which must be new")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # or what it has launched would train on
    faults = possible(arguments.faults)
    results: Results = {}
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": version("torch")}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only:
            chosen = trainer(name)
            if absent := [package for package, found in chosen.versions().items() if found is None]:
                print(f"{chosen.title}: left out, {', '.join(absent)} not installed", flush=True)
                continue
            print(f"{chosen.title}:", flush=True)
            place = (arguments.keep or Path(scratch)).resolve() / name
            results[chosen.title] = column(chosen, faults, place=place, seed=arguments.seed, limit_s=arguments.limit_s)
            record = {"time": time.time(), "versions": versions, "seed": arguments.seed, "results": results}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{matrix(results)}")
    sys.exit(0 if results else "none of the chosen trainers is installed: pip install . --group conformance")


if __name__ == "__main__":
    main()
