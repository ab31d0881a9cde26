"""Progress of a Kubeflow TrainJob: `kubectl get trainjob NAME -o jsonpath={.status.trainerStatus}`."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from muster.errors import one_line, say
from muster.loggers.base import Logger
from muster.loggers.tensorboard import COORDINATES

URL, CERTIFICATE, TOKEN = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
EVERY_S, ANSWERS_S = 10.0, 5.0
MOST_METRICS, LONGEST = 200, 64
"""Trainer refuses more than 256 metrics, and names and values of more than 64 characters."""


class TrainJob(Logger):
    """Posts progress, seconds left and last values to Trainer's server, every ten seconds.

    A thread posts them, so that a slow server delays no step. The first error is printed; later posts are tried again.

    `certificate`: file with the certificate of the server's authority. `token`: file with the pod's token, which the kubelet
    replaces from time to time. `total_steps`: 0 if unknown.

    Source: https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
    """

    def __init__(self, url: str, certificate: str, token: str, *, step: int, total_steps: int):
        self._url, self._certificate, self._token = url, certificate, token
        self._first, self._step, self._total = step, step, total_steps
        self._began, self._values = time.monotonic(), dict[str, float]()
        self._is_over, self._has_failed = threading.Event(), False
        self._thread = threading.Thread(target=self._post_all, name="trainjob", daemon=True)
        self._thread.start()

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] == "event":
            return
        before = "eval_" if record["kind"] == "eval" else ""
        found = {before + name: value for name, value in record.items() if name not in COORDINATES}
        numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
        self._values = {**self._values, **numbers}  # a new one: the thread reads it

    def advance(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(timeout=2 * ANSWERS_S)  # one post may be under way

    def status(self) -> dict[str, Any]:
        """Return Trainer's UpdateTrainJobStatusRequest."""
        done, values = self._step - self._first, self._values
        known: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if self._total:
            known["progressPercentage"] = min(100, 100 * self._step // self._total)
        if self._total and done:
            left = (self._total - self._step) * (time.monotonic() - self._began) / done
            known["estimatedRemainingSeconds"] = min(math.ceil(left), 2**31 - 1)
        metrics = {"step": str(self._step)} | {name: f"{value:.6g}" for name, value in values.items()}
        short = [(name, value) for name, value in metrics.items() if len(name) <= LONGEST][:MOST_METRICS]
        known["metrics"] = [{"name": name, "value": value} for name, value in short]
        return {"trainerStatus": known}

    def _post_all(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self._post()
        self._post()

    def _post(self) -> None:
        try:
            import ssl  # here: other jobs start without it
            from urllib.request import Request, urlopen

            context = ssl.create_default_context(cafile=self._certificate)
            words = {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {Path(self._token).read_text(encoding='utf-8').strip()}",
            }
            request = Request(self._url, json.dumps(self.status()).encode(), words, method="POST")
            with urlopen(request, timeout=ANSWERS_S, context=context):
                pass
        except Exception as error:  # whatever answers there
            if not self._has_failed:
                why = one_line(error)[:200] if isinstance(error, OSError) else type(error).__name__  # no header of ours
                say(f"muster: the TrainJob's status cannot be posted to {self._url}: {why}")
            self._has_failed = True


def of_environment(env: Mapping[str, str] = os.environ, *, step: int, total_steps: int) -> list[Logger]:
    """Return a TrainJob's logger if its Trainer takes the progress (feature gate TrainJobStatus), or none."""
    if not all(env.get(name) for name in (URL, CERTIFICATE, TOKEN)):
        return []
    return [TrainJob(env[URL], env[CERTIFICATE], env[TOKEN], step=step, total_steps=total_steps)]
