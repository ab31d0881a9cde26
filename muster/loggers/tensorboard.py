"""TensorBoard logger: event files in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from muster.flat import flatten
from muster.loggers.base import Logger

FLUSH_S = 2  # a rank that is killed loses no more; torch waits two minutes
COORDINATES = ("kind", "step", "epoch", "samples")


class TensorBoard(Logger):
    """Writes the numbers of `train` and `eval` records and the config, as hyperparameters, to `folder`/tensorboard."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        begins = not place.exists()
        self._writer = SummaryWriter(str(place), purge_step=step + 1, flush_secs=FLUSH_S)
        if begins and (folder / "config.yaml").exists():
            self._tell_config(yaml.safe_load((folder / "config.yaml").read_text()))

    def log(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # All in one summary: SummaryWriter.add_scalar takes ten times as long for each value.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars(record).items()]
        if values:
            writer: Any = self._writer.file_writer
            writer.add_summary(Summary(value=values), record["step"])

    def _tell_config(self, config: dict[str, Any]) -> None:
        """Write the config to the run's own event file: SummaryWriter.add_hparams would create another run."""
        from torch.utils.tensorboard import summary

        plain = (bool, int, float, str)
        values = {name: value if isinstance(value, plain) else str(value) for name, value in flatten(config).items()}
        make: Any = summary.hparams
        writer: Any = self._writer.file_writer
        experiment, session, _ = make(
            values, {"eval/loss": 0.0, "train/loss": 0.0}
        )  # the third summary marks the run as ended
        writer.add_summary(experiment)
        writer.add_summary(session)

    def close(self) -> None:
        self._writer.close()


def scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a `train` or `eval` record, named `train/loss`; an empty dict for an event."""
    if record["kind"] == "event":
        return {}
    known = {name: value for name, value in record.items() if name not in COORDINATES and value is not None}
    return {f"{record['kind']}/{name}": value for name, value in known.items()}
