"""TensorBoard's own event files, in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.loggers.base import Logger

COORDINATES = ("kind", "step", "epoch", "samples")


class TensorBoard(Logger):
    """`folder`/tensorboard: the numbers of every `train` and `eval` record, by step."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] != "event":
            for name, value in record.items():
                if name not in COORDINATES:
                    self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()
