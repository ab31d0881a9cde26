"""`python -m bench.scale [options]`: predict each strategy from 8 to 16,384 ranks by a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.scale.job import ScaledJob
from bench.scale.options import WORLD_SIZES, parse
from bench.scale.show import Prediction, draw, show
from bench.scale.strategies import STRATEGIES
from muster.collectives.table import write_json
from muster.errors import MusterError, say, tell
from muster.faults import lost_output


def main(arguments: Sequence[str]) -> int:
    """Predict, print and write the results, and return the exit code."""
    try:
        job, folder = parse(arguments)
        leave(predict(job), job, folder)
    except MusterError as error:
        tell(error)
        return error.exit_code
    return 0


def predict(job: ScaledJob) -> Prediction:
    """Return the prediction of every strategy at every world size."""
    return {
        name: {world_size: step(job, world_size) for world_size in WORLD_SIZES} for name, step in STRATEGIES.items()
    }


def leave(prediction: Prediction, job: ScaledJob, folder: Path) -> None:
    """Print the table, and write plot and numbers to the output folder. Raises StorageError."""
    steps = {name: {size: asdict(step) for size, step in steps.items()} for name, steps in prediction.items()}
    write_json(folder / "scale.json", {"job": asdict(job), "steps": steps})
    draw(prediction, job, folder / "scale.png")
    show(prediction)
    say(f"{folder}/scale.json and scale.png", sys.stdout)


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
