"""MLflow logger. `pip install mlflow`; for a tracking server, mlflow-skinny is enough."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from muster.dotted_names import flatten
from muster.loggers.base import Logger
from muster.loggers.tensorboard import scalars

LONGEST = 500
"""Characters of a parameter's value that every server accepts."""


class Mlflow(Logger):
    """One MLflow run per run folder. A resumed run continues it; steps already logged are not sent again.

    `uri`: tracking server; None: MLFLOW_TRACKING_URI, else `folder`/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...`).

    Source: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
    """

    def __init__(self, folder: Path, name: str, *, experiment: str, uri: str | None):
        where = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute()}/mlflow.db"
        self._client = _client(where)
        kept = folder / "mlflow-run-id"
        if kept.exists():
            self._id = kept.read_text(encoding="utf-8")
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._begin(folder, name, experiment)
            kept.write_text(self._id, encoding="utf-8")
        self._newest = {
            key: max(point.step for point in self._client.get_metric_history(self._id, key))
            for key in self._client.get_run(self._id).data.metrics
        }
        self._status = "KILLED"

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] == "event":
            self._status = "FINISHED" if record["event"] == "done" else self._status
            return
        new = {key: value for key, value in scalars(record).items() if record["step"] > self._newest.get(key, -1)}
        points = [Metric(key, value, int(_now_ms()), record["step"]) for key, value in new.items()]
        if points:
            self._client.log_batch(self._id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._id, status=self._status)

    def _begin(self, folder: Path, name: str, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        config = flatten(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        self._client.log_batch(run_id, params=[Param(key, str(value)[:LONGEST]) for key, value in config.items()])
        return run_id


def _client(where: str) -> MlflowClient:
    """Raises ValueError: this MLflow takes no store of files any more."""
    try:
        return MlflowClient(tracking_uri=where)
    except Exception as error:
        if where.startswith("file:") or "://" not in where:
            raise ValueError(
                "MLflow takes no store of files any more: use loggers.mlflow.uri=sqlite:///PATH/mlflow.db, or leave it out"
            ) from error
        raise


def _now_ms() -> float:
    return time.time() * 1000
