"""Profile some steps with torch.profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from muster.train.callbacks.base import Callback
from muster.train.config.constraints import Ge

if TYPE_CHECKING:
    from muster.train.loop import Run


class Profile(Callback):
    """Profiles `steps` steps after the first `skip_steps` of the attempt.

    Each rank writes `profile/rank-NNNNN-step-N.json` in the run's folder.
    Source: https://docs.pytorch.org/docs/stable/profiler.html; the files open at https://ui.perfetto.dev.
    """

    def __init__(self, *, skip_steps: Annotated[int, Ge(0)] = 5, steps: Annotated[int, Ge(1)] = 5):
        self.skip_steps, self.steps = skip_steps, steps
        self._profiler: Any = None

    def on_start(self, run: Run) -> None:
        self._first = run.step + self.skip_steps
        self._begin(run)

    def on_step_end(self, run: Run) -> None:
        if self._profiler and run.step == self._first + self.steps:
            self._profiler.stop()
            folder = Path(run.config.output_dir, "profile")
            folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(folder / f"rank-{run.world.rank:05d}-step-{self._first}.json"))
            self._profiler = None
        self._begin(run)

    def close(self) -> None:
        """Stops a running profiler without writing its trace."""
        if self._profiler:
            self._profiler.stop()

    def _begin(self, run: Run) -> None:
        if run.step == self._first and run.step + self.steps <= run.total_steps:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
