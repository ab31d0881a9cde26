"""The seam between a run and what keeps or shows its records. One logger, one file, and a yaml under conf/loggers/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.timing.clock import Times


class Logger:
    """Gets every record of a run, on rank 0 alone. Built from its values plus `folder`, `name`, `step` and `total_steps`
    where its constructor names them; `step` is where this attempt begins, and what a resumed run logs again lies after it.

    What a logger raises is said once, and the run does without it from then on.
    """

    def log(self, record: dict[str, Any]) -> None:
        """One record: `kind` (train, eval, event) and its fields, as in metrics.jsonl."""

    def timing(self, step: int, ranks: Sequence[Times]) -> None:
        """Where each rank's time went since it was last said, up to `step`. With every `train` record."""

    def advance(self, step: int) -> None:
        """A step is done. Called after every step: it must cost microseconds."""

    def close(self) -> None:
        """The attempt ends."""
