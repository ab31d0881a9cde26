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
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def scalars(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a `train` or `eval` record, as `train/loss`; of an event none."""
    if record["kind"] == "event":
        return {}
    return {f"{record['kind']}/{name}": value for name, value in record.items() if name not in COORDINATES}
