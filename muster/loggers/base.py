"""Interface between a run and its loggers. Each logger has one file, and a yaml under conf/loggers/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.timing.clock import Times


class Logger:
    """Base class of loggers, which receive every record of a run, on rank 0 only.

    A logger is built from its config values plus `folder`, `name`, `step` and `total_steps`, if its constructor names
    them. `step` is the step at which this attempt begins; a resumed run logs the steps after it again.

    If a logger raises, the error is printed once and the run continues without that logger.
    """

    def log(self, record: dict[str, Any]) -> None:
        """Log one record: `kind` (train, eval, event) and its fields, as in metrics.jsonl."""

    def timing(self, step: int, ranks: Sequence[Times]) -> None:
        """Log each rank's times since the last call, up to `step`. Called with `train` records."""

    def advance(self, step: int) -> None:
        """Report that a step is done. Called after every step: it must take microseconds."""

    def close(self) -> None:
        """Close the logger at the end of the attempt."""
