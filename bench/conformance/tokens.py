"""`python -m bench.conformance.tokens`: the distance of each trainer's weights from those of the full batch, on padded sequences."""

from __future__ import annotations

import argparse
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from bench.conformance.__main__ import names
from bench.conformance.launches import Launches
from bench.conformance.token_loops import SEQUENCES, ours, plain
from bench.conformance.trainers import NAMES, trainer

SETTINGS = {"one rank": (1, SEQUENCES), "two ranks": (2, SEQUENCES // 2), "one rank, micro-batches of 2": (1, 2)}
"""Ranks, and the sequences that a rank puts through the model at once."""


def distance(name: str, place: Path, *, ranks: int, batch: int, limit_s: float) -> float:
    """Train by one trainer; return the largest distance of a weight. Raises RuntimeError if it does not train."""
    place.mkdir(parents=True)
    folder, launches = place / "run", Launches(place, place / "log")
    worker = ["-m", "bench.conformance.token_loops", name, str(folder), str(batch)]
    if name == "ours":
        worker = ours(folder, batch)
    try:
        code = launches.start(worker, ranks=ranks, max_restarts=0).wait(limit_s)
    finally:
        launches.kill()
    if code:
        raise RuntimeError(f"{trainer(name).title} does not train:\n{(place / 'log').read_text()[-2000:]}")
    return furthest(torch.load(folder / "model.pt", weights_only=True))


def furthest(found: dict[str, Tensor]) -> float:
    """Return the largest distance of a weight from plain PyTorch's."""
    expected = plain().state_dict()
    return max(float((found[key] - expected[key]).abs().max()) for key in expected)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.conformance.tokens", description=__doc__)
    parser.add_argument("--only", type=names(NAMES), default=[*NAMES], help=f"of {','.join(NAMES)}; default: all")
    parser.add_argument("--limit-s", type=float, default=90.0, help="the longest that a launch may take")
    arguments = parser.parse_args()
    print(f"python {platform.python_version()}, torch {version('torch')}", flush=True)
    print(f"| trainer | {' | '.join(SETTINGS)} |\n|{'---|' * (len(SETTINGS) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only:
            found = trainer(name).versions()
            if absent := [package for package, given in found.items() if given is None]:
                print(f"{trainer(name).title}: left out, {', '.join(absent)} not installed", flush=True)
                continue
            cells = [
                distance(name, Path(scratch) / f"{name}-{number}", ranks=ranks, batch=batch, limit_s=arguments.limit_s)
                for number, (ranks, batch) in enumerate(SETTINGS.values())
            ]
            print(f"| {trainer(name).title} | {' | '.join(f'{each:.1e}' for each in cells)} |", flush=True)


if __name__ == "__main__":
    main()
