"""Compare two processes with one on the same global batches of an expensive model: `python -m bench.speedup`.

Each process has one thread. Whole runs alternate, so that other load on the machine slows both. A run's speed is the
median of metrics.jsonl's samples/s over all steps but the first; the result is the median of the ratios of each pair.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from kit.job import Result, run

ROUNDS, STEPS = int(os.environ.get("ROUNDS", "5")), int(os.environ.get("STEPS", "8"))
PATIENCE_S = 600.0  # a busy machine is slow, not broken
WORKLOAD = (
    "model=resnet18",
    "data=synthetic",
    "data.image_shape=[3,32,32]",
    "data.num_samples=1024",
    "batch_size=32",
    "optimizer.lr=0.01",
    "eval.every_steps=off",
    f"max_steps={STEPS}",
)


def speed(result: Result) -> float:
    """Return samples/s over all ranks."""
    return statistics.median(line["samples_per_s"] for line in result.lines("train")[1:])


def main() -> None:
    """Print one row: samples/s with one process and with two, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [
            tuple(
                speed(run(Path(folder) / f"{turn}-{ranks}", *WORKLOAD, ranks=ranks, timeout_s=PATIENCE_S, cold=True))
                for ranks in (1, 2)
            )
            for turn in range(ROUNDS)
        ]
    one, two = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(two / one for one, two in pairs)
    print("| workload | one process, samples/s | two, samples/s | ratio |\n|---|---|---|---|")
    print(f"| resnet18 32x32, batch 32 in all | {one:.0f} | {two:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
