"""The state `running` of an attempt: what every training loop does beside its steps, the trainer's and a user's own."""

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

    Args:
        peers: the ranks, this rank's heartbeat and the agreement on where to stop.
        progress: has the current step.
        total_steps: steps of the whole run; 0 if unknown.
        records: the records for the loggers.
        checkpoints: the checkpoints of the run.
        clock: this rank's times.
        means: what the next record is of.
        intervals: when it logs, evaluates and saves.
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
        """The ranks' group."""
        return self.peers.world

    @property
    def step(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self.progress.step

    def start(self) -> None:
        """Start the clocks, when training begins."""
        self.clock.begin()
        self.records.begin()

    def begin(self, phase: str) -> bool:
        """Enter a phase of work; return False if the ranks agreed to stop before it. Collective, the same on all ranks."""
        return self.peers.begin(phase, self.step)

    def look(self) -> None:
        """Learn what is due after this step by the clock. Collective: every rank must call it after each step."""
        self.intervals.look(self.world, self.progress)

    def is_due(self, what: str) -> bool:
        """Return whether `what` is due after this step, by its interval."""
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
        """Record and return the values that `measure` gives: None if the ranks have stopped before its end. Collective."""
        began = time.perf_counter()
        with self.clock.spending("evaluation"):
            values = measure()
        if values is not None:
            self.records.eval(step=self.step, epoch=epoch, seconds=time.perf_counter() - began, values=values)
        return values

    def enter(self, phase: str) -> None:
        """Tell the other ranks' heartbeats that this rank is in `phase` now: some phases may take long."""
        self.peers.heartbeat.enter(phase, self.step)

    def save(
        self, state: Callable[[], dict[str, Any]], position: dict[str, Any], *, finite: Collection[str] = ()
    ) -> None:
        """Start to write a checkpoint of this step. Collective.

        state: returns the state to save. position: entries of the manifest about the progress. finite: names of tensors
        of the state that must be finite.

        Raises:
            Diverged: a tensor that must be finite was not, in the checkpoint before.
            StorageError: three checkpoints in a row could not be written.
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
        """Wait for the checkpoint of the step at which the ranks have stopped, and return this end. Raises StorageError.

        is_saved: False if the step is not saved.
        """
        self.flush()
        self.records.event_once("preempted", step=self.step)
        of = f" of {self.total_steps}" if self.total_steps else ""
        how = "and saved it" if is_saved else "and did not save it, as the loop's body had not ended"
        said = f"stopped at step {self.step}{of} {how}: run the same command again to resume"
        return Ending(self.step, self.total_steps, preempted=said)

    def done(self) -> Ending:
        """Wait for the last checkpoint, and return the end of the run. Raises StorageError."""
        self.flush()
        return self.ending()

    def ending(self) -> Ending:
        """Return the end of a run that is done."""
        return Ending(self.step, self.total_steps or self.step)

    def settle(self) -> None:
        """Wait a while for the checkpoint that is being written, before the run ends for another reason."""
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
    """Return the checkpoints of the run in `folder`, reported in `records`.

    keep: number of checkpoints that are kept. facts: entries about the run in each manifest. newest_step: step of the
    newest checkpoint.
    """
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
