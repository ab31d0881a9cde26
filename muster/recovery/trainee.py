"""What one rank trains in one attempt, as checkpoints and survival see it: the one seam between a loop and its attempt.

There are two: a strategy with its callbacks (train/trainee.py), and what a Job tracks (job/trainee.py). Each has a state by
name, for checkpoints; a replica, which is what all ranks share between two steps; and what only this rank has, which is in
its journal (recovery/journal.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from muster.checkpoint.commit import Saved
from muster.checkpoint.manager import Checkpoints
from muster.checkpoint.tensor_versions import Changes, Place, place
from muster.checkpoint.trained import Trained
from muster.errors import one_line
from muster.loggers.metrics import Metrics
from muster.recovery.journal import StepJournal
from muster.recovery.survival import WHY_NOT, Survival
from muster.timing.clock import Clock
from muster.world.group import World


class Steps(Protocol):
    """What survival needs of an attempt that makes steps: see attempt/attempt.py."""

    @property
    def world(self) -> World: ...
    @property
    def step(self) -> int: ...
    @property
    def records(self) -> Metrics: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def clock(self) -> Clock: ...
    def enter(self, phase: str) -> None: ...


class Trainee(Trained):
    """What one rank trains in one attempt. survival: None if the death of another rank ends this one."""

    key: ClassVar[str]
    """The setting that asks for survival."""

    def __init__(self, world: World, survival: Survival | None = None):
        self.world, self._survival = world, survival
        self.is_followed = False
        """True while this rank notes what only it has, so that a replacement can go on in its place."""
        self.changes = Changes([])
        """Tells what has changed since the step began, or the one before it ended."""
        self.noted: list[Place] = []
        """The buffers as they were when they were noted."""
        self.unsure: list[str] = []
        """What is logged for the next record and may be another rank's value, or an older one, as this rank has died."""

    @property
    @abstractmethod
    def running(self) -> Steps:
        """The attempt, once it makes steps."""

    @property
    def journal(self) -> StepJournal:
        """What outlives this process."""
        assert self._survival
        return self._survival.journal

    def follow(self) -> None:
        """Note from now on what only this rank has. Collective."""
        self.is_followed = True

    def refuse(self, why: str) -> None:
        """Record why the death of a rank restarts all from now on."""
        if self.is_followed and self._survival:
            self.is_followed = False
            self._survival.refuse()
            self.running.records.event("note", text=WHY_NOT.format(key=self.key, why=why))

    def note(self, number: int, facts: dict[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Journal facts and buffers that only this rank has, under the number of a step or of a part of it."""
        try:
            self.journal.write(number, facts, buffers)
            self.noted = [*map(place, buffers.values())]
        except (ValueError, RuntimeError) as error:
            self.refuse(f"a rank's own buffers cannot be noted: {one_line(error)}")

    def release(self) -> None:
        """Stop noting, and remove what `follow` has set up."""
        self.is_followed = False

    @abstractmethod
    def begin(self) -> None:
        """Begin before the first step. Collective. Raises ConfigError: ranks differ in what must be alike."""

    @abstractmethod
    def resume(self, saved: Saved) -> None:
        """Load a checkpoint, and go on at its step. Collective. Raises ConfigError: it is of something else. StorageError."""

    @property
    def owes_save(self) -> bool:
        """True if a checkpoint of this step is due and not begun."""
        return False

    def is_past_update(self) -> bool:
        """Return True if the step is counted, and the loop still does what follows it."""
        return False

    @abstractmethod
    def changed(self) -> str:
        """Return what the step that is not done has changed; empty if nothing, or if no step has begun."""

    def why_not_whole(self) -> str:
        """Return what makes this rank's state another than that of the end of a step, which is handed on; empty if nothing does."""
        return ""

    @abstractmethod
    def is_whole(self) -> bool:
        """Return True if the state is that of the end of a step."""

    @property
    @abstractmethod
    def best(self) -> dict[str, Any] | None:
        """The best evaluation so far, whose checkpoint is kept (attempt/best.py)."""

    @property
    def unsaved_best(self) -> int:
        """The step of the best evaluation if its checkpoint, of an earlier step, was still being written; else 0."""
        step: int = self.best["step"] if self.best else 0
        return step if (self.running.checkpoints.newest_step or 0) < step < self.running.step else 0

    @abstractmethod
    def mark(self) -> list[int]:
        """Return how far this rank has come: its step, and what it has done of it. Marks are compared in this order."""

    @abstractmethod
    def replica(self) -> dict[str, Any]:
        """Return the flat state that all ranks share, without communication."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the others need beside the replica, as JSON values."""

    @abstractmethod
    def take_over(self, state: dict[str, Any], facts: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Load the replica and the facts of another rank, and from the journal what only this rank has. Collective.

        own: this rank's facts; empty if it has died. Raises RankLost: a rank has no journal of the last step.
        """

    # The emergency checkpoint, when a rank is lost for good: see emergency_checkpoint.py.

    @abstractmethod
    def has_common_buffers(self) -> bool:
        """Return True if training may go on from this rank's buffers alone."""

    @abstractmethod
    def alone(self) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """Return the state, the position and the last records of a checkpoint that this rank writes alone. Raises StorageError."""
