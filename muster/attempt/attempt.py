"""The state `running` of an attempt: what the trainer's loop and a user's own do beside their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from muster.attempt.intervals import Intervals, Timed
from muster.attempt.lifecycle import Ending, Peers
from muster.attempt.running_means import RunningMeans
from muster.checkpoint.manager import Checkpoints
from muster.lease.open_folder import RunFolder, RunOptions
from muster.loggers.metrics import Metrics
from muster.timing.clock import Clock, gathered, spread
from muster.world.group import World

SETTLE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt that makes steps: it begins them, logs, evaluates, saves, and ends when the run is done or the ranks agree to stop.

    total_steps: of the whole run; 0 if unknown.
    """

    peers: Peers
    progress: Timed
    total_steps: int
    records: Metrics
    checkpoints: Checkpoints
    clock: Clock
    means: RunningMeans
    intervals: Intervals

    @property
    def world(self) -> World:
        return self.peers.world

    @property
    def step(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self.progress.step

    def start(self) -> None:
        self.clock.begin()
        self.records.begin()

    def begin(self, phase: str) -> bool:
        """See `Peers.begin`. Collective."""
        return self.peers.begin(phase, self.step)

    def look(self) -> None:
        """See `Intervals.look`. Collective, after each step."""
        self.intervals.look(self.world, self.progress)

    def is_due(self, what: str) -> bool:
        return self.intervals.is_due(what, self.progress)

    def log(self, own: Sequence[float], line: Callable[[list[float]], dict[str, Any]]) -> None:
        """Write a `train` record of the steps since the last one. Collective.

        own: numbers to add up over the ranks. line: makes the fields of the record from their sums.
        """
        is_due = self.clock.is_due(self.world.size)
        times = spread(self.clock.read(), rank=self.world.rank, size=self.world.size) if is_due else []
        numbers = [*own, *times]
        sums = self.world.sum(numbers) if numbers else []
        self.records.train(step=self.step, **line(sums[: len(own)]))
        if is_due:
            self.records.timing(self.step, gathered(sums[len(own) :]))

    def evaluate(self, measure: Callable[[], dict[str, float] | None], *, epoch: int) -> dict[str, float] | None:
        """Record and return the values of `measure`; None if the ranks have stopped before its end. Collective."""
        began = time.perf_counter()
        with self.clock.spending("evaluation"):
            values = measure()
        if values is not None:
            self.records.eval(step=self.step, epoch=epoch, seconds=time.perf_counter() - began, values=values)
        return values

    def enter(self, phase: str) -> None:
        """Tell the other ranks' heartbeats that this rank is in `phase`: some phases may take long."""
        self.peers.heartbeat.enter(phase, self.step)

    def save(
        self, state: Callable[[], dict[str, Any]], position: dict[str, Any], *, finite: Collection[str] = ()
    ) -> None:
        """Start to write a checkpoint of this step. Collective.

        position: entries of the manifest about the progress. finite: names of tensors of the state that must be finite.
        Raises Diverged: such a tensor was not finite in the checkpoint before.
        Raises StorageError: three checkpoints in a row could not be written.
        """
        self.enter("save")
        with self.clock.spending("checkpoint"):
            self.checkpoints.save(state=state(), position={"step": self.step, **position}, finite=finite)
        self.enter("step")

    def flush(self) -> None:
        """Wait for the checkpoint that is being written. Raises StorageError or Diverged if it failed."""
        self.enter("save")
        with self.clock.spending("checkpoint"):
            self.checkpoints.flush()

    def stopped(self, *, is_saved: bool = True) -> Ending:
        """Wait for the checkpoint of the step at which the ranks have stopped, and return this end. Raises StorageError."""
        self.flush()
        self.records.event_once("preempted", step=self.step)
        of = f" of {self.total_steps}" if self.total_steps else ""
        how = "and saved it" if is_saved else "and did not save it, as it was within a step"
        said = f"stopped at step {self.step}{of} {how}: run the same command again to resume"
        return Ending(self.step, self.total_steps, preempted=said)

    def done(self) -> Ending:
        """Wait for the last checkpoint, and return the end of the run. Raises StorageError."""
        self.flush()
        return self.ending()

    def ending(self) -> Ending:
        return Ending(self.step, self.total_steps or self.step)

    def settle(self) -> None:
        """Wait at most `SETTLE_S` for the checkpoint that is being written, before the run ends for another reason."""
        self.checkpoints.settle(SETTLE_S)

    def close(self) -> None:
        """Close the records, with the times since the last line."""
        self.records.close(self.step, self.clock.rest())


def open_checkpoints(
    options: RunOptions,
    *,
    folder: RunFolder,
    world: World,
    records: Metrics,
    keep: int,
    facts: dict[str, Any],
    newest_step: int | None,
) -> Checkpoints:
    """Return the checkpoints of the run in `folder`, reported in `records`. facts: entries about the run in each manifest."""
    return Checkpoints(
        options.checkpoints,
        folder=folder.path,
        world=world,
        keep=keep,
        facts=facts,
        newest_step=newest_step,
        may_commit=folder.may_commit,
        on_commit=lambda said: records.event("checkpoint_failed" if "failed" in said else "checkpoint", **said),
    )
