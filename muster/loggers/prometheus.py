"""Prometheus logger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from muster.loggers.base import Logger
from muster.loggers.tensorboard import COORDINATES
from muster.timing.clock import PARTS, Times


class Prometheus(Logger):
    """Serves the run's progress at `http://host:port/metrics` on rank 0.

    muster_step, muster_total_steps, muster_world_size; muster_train{name} and muster_eval{name}: last values;
    muster_samples; muster_events_total{event}; muster_rank_seconds_total{rank,part}: time of each rank by part.

    `name`: label `run` of all metrics. `host`: 0.0.0.0 is reachable from everywhere, the default from this host only.

    Raises OSError: it cannot listen at `port`.

    Source: https://prometheus.github.io/client_python/
    """

    key = "metrics.port"
    """The port's name in errors."""

    def __init__(self, name: str, step: int, total_steps: int, *, port: Annotated[int, Ge(1)], host: str = "127.0.0.1"):
        registry = CollectorRegistry()

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(name, meaning, ("run", *labels), registry=registry)

        self._step = gauge("muster_step", "Optimizer steps done.").labels(name)
        self._samples = gauge("muster_samples", "Samples trained on.").labels(name)
        self._world = gauge("muster_world_size", "Ranks of this attempt.").labels(name)
        self._time = gauge("muster_last_record_timestamp_seconds", "Time of the last record of the run.").labels(name)
        gauge("muster_total_steps", "Total number of steps of the run.").labels(name).set(total_steps)
        self._values = {
            "train": gauge("muster_train", "Values of the last train record.", "name"),
            "eval": gauge("muster_eval", "Values of the last evaluation.", "name"),
        }
        self._events = Counter("muster_events", "Events of this attempt.", ("run", "event"), registry=registry)
        self._seconds = Counter(
            "muster_rank_seconds",
            "Seconds of each rank by part of its time.",
            ("run", "rank", "part"),
            registry=registry,
        )
        self._run = name
        self._step.set(step)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"{self.key}={port} on {host}: {reason}; give another port") from error

    def log(self, record: dict[str, Any]) -> None:
        self._time.set_to_current_time()
        if "world_size" in record:
            self._world.set(record["world_size"])
        if record["kind"] == "event":
            self._events.labels(self._run, re.sub(r"\W", "_", record["event"])).inc()
            return
        for name, value in record.items():
            if name not in COORDINATES and isinstance(value, (int, float)):
                self._values[record["kind"]].labels(self._run, name).set(value)
        if "samples" in record:
            self._samples.set(record["samples"])
            self._step.set(record["step"])

    def timing(self, step: int, ranks: Sequence[Times]) -> None:
        for rank, times in enumerate(ranks):
            for part in PARTS[1:]:
                self._seconds.labels(self._run, str(rank), part).inc(max(0.0, getattr(times, part)))
            self._seconds.labels(self._run, str(rank), "compute").inc(max(0.0, times.own - times.data))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1)
