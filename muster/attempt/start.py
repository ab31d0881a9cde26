"""Where an attempt begins: before the first step, at a checkpoint, or at the step of a rank that is alive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from muster.attempt.attempt import Attempt
from muster.attempt.lifecycle import Lifecycle
from muster.attempt.records import hosts_of, record_start
from muster.checkpoint.commit import Saved
from muster.lease.open_folder import Refusal, RunFolder, RunOptions, keep_folder, open_folder
from muster.loggers.metrics import Metrics
from muster.recovery.emergency_checkpoint import make_up
from muster.recovery.hand_over import HandOver
from muster.recovery.trainee import Trainee
from muster.world.group import World


class Start(ABC):
    """Where an attempt begins. newest_step: of the run's own newest checkpoint; None if there is none."""

    def __init__(self, folder: RunFolder, newest_step: int | None, kept: HandOver):
        self.folder, self.newest_step, self.kept = folder, newest_step, kept

    @property
    def saved(self) -> Saved | None:
        """The checkpoint that the attempt begins with, if any."""
        return self.folder.saved

    @abstractmethod
    def restore(self, trainee: Trainee) -> None:
        """Give `trainee` the state that the attempt begins with. Collective. Raises MusterError."""

    def open_records(self, world: World, opened: Callable[[list[str]], Metrics]) -> Metrics:
        """Return new records, in place of those of the attempt before: `opened` gets the host of each rank. Collective."""
        self.kept.close_records()
        return self.kept.open_records(partial(opened, hosts_of(world)))

    def tell(self, running: Attempt, notes: Iterable[str], *, save: Callable[[], object], **facts: Any) -> None:
        """Record how the attempt begins. Collective. save: saves the step, if a rank's death has cut its save short."""
        lost: Any = {"deaths": self.kept.deaths(running.world), "why_lost": self.kept.why_lost}
        record_start(running.records, self.folder, running.world, step=running.step, **lost, **facts)
        self.kept.have_told()
        for text in notes:
            running.records.event("note", text=text)
        make_up(running, self.folder)


class Fresh(Start):
    """The run has no checkpoint: the attempt begins before the first step."""

    def restore(self, trainee: Trainee) -> None:
        trainee.begin()


class Resume(Start):
    """The attempt begins at a checkpoint."""

    def restore(self, trainee: Trainee) -> None:
        assert self.saved
        trainee.resume(self.saved)


class Rejoin(Start):
    """The attempt begins with the state of a rank that is alive, and goes on with the records."""

    def restore(self, trainee: Trainee) -> None:
        self.kept.hand_on(trainee)
        self.newest_step = self.kept.newest_step

    def open_records(self, world: World, opened: Callable[[list[str]], Metrics]) -> Metrics:
        return self.kept.open_records(partial(opened, hosts_of(world)))

    def tell(self, running: Attempt, notes: Iterable[str], *, save: Callable[[], object], **facts: Any) -> None:
        self.kept.go_on(running, self.folder.path, save=save)


def begin(life: Lifecycle, world: World, options: RunOptions, kept: HandOver, *, refusal: Refusal) -> Start:
    """Claim the run's folder, and return where the attempt begins. Collective. Raises MusterError: see `Lifecycle.claim`."""
    if kept.furthest(world) is not None:
        return Rejoin(life.claim(options, opens=keep_folder), None, kept)
    folder = life.claim(options, opens=partial(open_folder, refusal=refusal))
    return (Resume if folder.saved else Fresh)(folder, folder.newest_step(options), kept)
