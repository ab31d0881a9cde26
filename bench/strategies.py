"""Compare strategies on the same model and data: `python -m bench.strategies ddp fsdp hybrid,shard=2 --nproc 4`.

Whole runs alternate, so that other load on the machine slows all of them. A run's speed is the median of
metrics.jsonl's samples/s over all windows but the first; the result is the median of each turn's ratio to the first
strategy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from kit.job import run

from bench.speedup import PATIENCE_S, speed
from bench.steps import WORKLOAD, overrides


def main() -> None:
    """Print one row per strategy: steps/s, and their ratio to those of the first."""
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=__doc__)
    parser.add_argument("strategies", nargs="+", help="names, with options after commas")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of a run (default: 60)")
    parser.add_argument("--set", default=WORKLOAD, help=f"what is trained (default: {WORKLOAD})")
    given = parser.parse_args()
    windows = ["eval.every_steps=off", f"log.every_steps={max(1, given.steps // 6)}", f"max_steps={given.steps}"]

    def turn(strategy: str, folder: Path) -> float:
        line = [*given.set.split(), *overrides(strategy), *windows]
        result = run(folder, *line, ranks=given.nproc, timeout_s=PATIENCE_S, cold=True)
        last = result.lines("train")[-1]
        return speed(result) * last["step"] / last["samples"]

    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            [turn(strategy, Path(folder) / f"{number}-{place}") for place, strategy in enumerate(given.strategies)]
            for number in range(given.rounds)
        ]
    print(f"| {given.nproc} processes | steps/s | beside {given.strategies[0]} |\n|---|---|---|")
    for place, strategy in enumerate(given.strategies):
        steps_per_s = statistics.median(each[place] for each in rounds)
        ratio = statistics.median(each[place] / each[0] for each in rounds)
        print(f"| {strategy} | {steps_per_s:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
