"""This kit, by its command line: `-m train` with the parts by import path."""

from __future__ import annotations

import json
from pathlib import Path

from bench.conformance.parts import BATCH, KEEP, LR, SAVE_EVERY
from bench.conformance.trainers.base import Trainer, numbered


def worker(folder: Path, epochs: int) -> list[str]:
    return [
        *("-m", "train", f"output_dir={folder}", f"epochs={epochs}", f"batch_size={BATCH}", "loader.num_workers=1"),
        *("data._target_=bench.conformance.parts.Points", "model._target_=bench.conformance.parts.Net"),
        *("optimizer=adamw", f"optimizer.lr={LR}"),
        *(f"checkpoint.every_steps={SAVE_EVERY}", f"checkpoint.keep={KEEP}", "log.every_steps=1"),
        *("log.tensorboard=false", "log.report=false", "log.progress=none"),
    ]


def logged(folder: Path) -> list[int]:
    """Return the steps of the `train` lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


TRAINER = Trainer(
    title="Muster",
    packages=(),
    worker=worker,
    checkpoints=lambda folder: numbered([*folder.glob("checkpoints/step-*")]),
    metrics=logged,
    weights="model.pt",
)
