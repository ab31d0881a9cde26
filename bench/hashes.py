"""SHA-256 of model.pt by model and world size, with `virtual_world_size=8`: `python -m bench.hashes`, as a table.

Each run is started by torchrun. The torchrun of "killed" is killed twice (SIGKILL), and the run resumes at other world
sizes. Exit code 1 if a model has more than one hash.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

from kit.job import reached, run, start, wait_for

LINE = ("virtual_world_size=8", "batch_size=50", "optimizer=adamw", "grad_clip=1", "checkpoint.every_steps=10")
MODELS = {
    "mlp": ("model=mlp", "max_steps=100"),
    "convnet (batch norm, augmentation)": ("model=convnet", "data.augment=true", "max_steps=60"),
    "gpt (dropout)": (
        "model=gpt", "model.dropout=0.1", "model.num_layers=2", "data=text", "objective=language_modeling",
        "eval.max_samples=100", "max_steps=30",
    ),
}  # fmt: skip
SIZES = (1, 2, 3, 4, 8)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()[:12]


def undisturbed(folder: Path, overrides: tuple[str, ...], ranks: int) -> str:
    run(folder, *LINE, *overrides, ranks=ranks, timeout_s=900, cold=True)
    return digest(folder)


def killed(folder: Path, overrides: tuple[str, ...]) -> str:
    """Train on three ranks until killed, then on one until killed, then on four to the end."""
    for ranks, step in ((3, 12), (1, 22)):
        process = start(folder, *LINE, *overrides, ranks=ranks, cold=True)
        wait_for(folder, reached(step), process=process, timeout_s=300)
        process.kill()
        process.communicate()
    return undisturbed(folder, overrides, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    several = 0
    columns = [f"{size} rank{'s' * (size > 1)}" for size in SIZES] + ["3, killed; 1, killed; 4"]
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    for name in parser.parse_args().models:
        overrides = MODELS[name]
        with tempfile.TemporaryDirectory() as place:
            found = [undisturbed(Path(place) / f"on-{size}", overrides, size) for size in SIZES]
            found.append(killed(Path(place) / "killed", overrides))
        several += len(set(found)) > 1
        print(f"| {name} | {' | '.join(f'`{each}`' for each in found)} |", flush=True)
    sys.exit(several > 0)


if __name__ == "__main__":
    main()
