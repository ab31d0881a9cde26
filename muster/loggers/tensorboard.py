"""TensorBoard logger."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from muster.dotted_names import flatten
from muster.loggers.base import Logger

COORDINATES = ("kind", "step", "epoch", "samples")
VERSION = "brain.Event:2"
"""Header of an event file."""


def import_writer() -> None:
    """Import the writer, which takes a second, once for a process whose children write event files."""
    with contextlib.suppress(ImportError):  # which `TensorBoard` raises
        importlib.import_module("tensorboard.compat.proto.event_pb2")
        importlib.import_module("tensorboard.summary.writer.record_writer")


class TensorBoard(Logger):
    """Writes `train` and `eval` values and the config, as hyperparameters, to `folder`/tensorboard.

    Each event is written at once, so that a killed rank loses none. torch's SummaryWriter writes later, in a thread that takes
    2 % of steps of 2 ms.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        place = folder / "tensorboard"
        begins = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (place / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(file_version=VERSION)
        self._write(
            step=step + 1, session_log=SessionLog(status=SessionLog.START)
        )  # hides later steps of earlier files
        if begins and (folder / "config.yaml").exists():
            self._tell_config(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))

    def log(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars(record).items()]
        if values:
            self._write(step=record["step"], summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _tell_config(self, config: dict[str, Any]) -> None:
        """Write to the run's own event file: SummaryWriter.add_hparams would create another run."""
        from torch.utils.tensorboard import summary

        plain = (bool, int, float, str)
        values = {name: value if isinstance(value, plain) else str(value) for name, value in flatten(config).items()}
        make: Any = summary.hparams
        experiment, session, _ = make(
            values, {"eval/loss": 0.0, "train/loss": 0.0}
        )  # the third summary marks the run as ended
        self._write(summary=experiment)
        self._write(summary=session)

    def close(self) -> None:
        self._file.close()


def scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record's values, named `train/loss`; none for an event."""
    if record["kind"] == "event":
        return {}
    known = {name: value for name, value in record.items() if name not in COORDINATES and value is not None}
    return {f"{record['kind']}/{name}": value for name, value in known.items()}
