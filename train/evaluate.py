"""`muster evaluate RUN`: evaluate a run's model from any checkpoint, on any split and any number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from muster.errors import MusterError
from muster.faults import lost_output
from muster.faults.preemption import Preemption
from muster.process import end


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster evaluate", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, or a sweep's: then its best run")
    parser.add_argument(
        "--checkpoint", help="a step, newest or best (default: model.pt if the run is done, else newest)"
    )
    parser.add_argument("--split", choices=["test", "train"], default="test")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given, overrides = parser.parse_known_args()
    lost_output.endure()
    preemption = Preemption()
    preemption.install()
    from muster.train.evaluate_run import evaluate  # imports torch, which --help does without

    try:
        how = {"checkpoint": given.checkpoint, "split": given.split, "as_json": given.json}
        code = evaluate(given.run, overrides, preemption, **how)
    except MusterError as error:
        from muster.errors import tell

        tell(error)
        code = error.exit_code
    end(code)


if __name__ == "__main__":
    main()
