"""`torchrun ... -m muster doctor [options] [overrides]`: check if this cluster can train. Run it as the job will be run.

`muster doctor --lint slurm/ k8s/` finds mistakes in batch scripts and manifests, and needs no cluster.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from muster.doctor.lint import files_in, lint
from muster.doctor.show import show, verdict, write
from muster.doctor.visit import examine
from muster.errors import MusterError, tell
from muster.faults import lost_output
from muster.process import end
from muster.train.config.compose import compose
from muster.train.config.keys import Config
from muster.train.settings import group_options, visit_of
from muster.world.environment import Environment
from muster.world.group import start

FAILED = 1


def main() -> None:
    lost_output.endure()
    parser = argparse.ArgumentParser(prog="muster doctor", description=__doc__)
    parser.add_argument("--expect", type=int, metavar="RANKS", help="expected number of ranks")
    parser.add_argument("--quick", action="store_true", help="skip the speed measurements")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of doctor.json and links.png (runs)")
    parser.add_argument(
        "--lint", nargs="+", type=Path, metavar="FILE", help="check batch scripts and manifests instead"
    )
    parser.add_argument("overrides", nargs="*", help="overrides, as for a run: output_dir, dist.timeout_s, ...")
    given = parser.parse_intermixed_args()
    try:
        code = looked_into(given.lint) if given.lint else visited(compose(given.overrides), given)
    except MusterError as error:
        tell(error)
        code = error.exit_code
    end(code)


def visited(config: Config, given: argparse.Namespace) -> int:
    """Run all checks on all ranks and report them on rank 0. Return 0, or 1 if training cannot work. Collective. Raises MusterError."""
    world = start(group_options(config), Environment.from_env(config.dist.init_method))
    results = examine(world, visit_of(config, expected=given.expect, quick=given.quick))
    fails = False
    if world.is_first:
        show(results, Console(soft_wrap=True))
        write(results, given.out)
        print(f"facts of every rank: {given.out / 'doctor.json'}")
        print(verdict(results), flush=True)
        fails = any(finding["fails"] for result in results for finding in result["findings"])
    fails = bool(world.sum([float(fails)])[0])
    world.close()
    return FAILED if fails else 0


def looked_into(paths: list[Path]) -> int:
    """Print the mistakes in files. Return 0 if there are none, else 1."""
    mistakes, number = lint(paths), len(files_in(paths))
    for mistake in mistakes:
        print(mistake)
    print(
        f"{len(mistakes)} mistake{'s' * (len(mistakes) != 1)} found in {number} file{'s' * (number != 1)}", flush=True
    )
    return FAILED if mistakes else 0


if __name__ == "__main__":
    main()
