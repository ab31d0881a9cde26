"""What a job keeps from one attempt to the next when a rank dies: see hand_over.py.

Between two steps the state of a rank is whole: the optimizer's step is counted, and the loop's body has ended. A survivor
keeps its state if it has changed no parameter since then, as in a backward pass, which waits for the sum of the gradients. A
rank's journal has its own sums of the log, between two steps, and its own buffers, also at the first gradient of a backward
pass: so before its part of the step's sum leaves it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from muster.attempt.attempt import Attempt
from muster.attempt.running_means import RunningMeans
from muster.checkpoint.commit import Saved
from muster.checkpoint.manager import restore
from muster.checkpoint.plain_values import host_copy
from muster.checkpoint.tensor_versions import Changes, Place, place
from muster.checkpoint.trained import SavedTensor
from muster.data.fingerprint import hash_of, look
from muster.data.generators import key_of, seed_generators
from muster.errors import RankLost
from muster.job.replicas import first_apart, hooks_with_state
from muster.job.tracked_state import FROZEN, GRADIENTS, ZEROED, Tracked
from muster.recovery.emergency_checkpoint import check_finite
from muster.recovery.hand_over import HandOver
from muster.recovery.survival import Survival
from muster.recovery.trainee import Trainee
from muster.world.dtensor import in_pieces
from muster.world.group import World

NOTES = 4
"""The last entries of the journal that are needed: at the end of a step, in the middle of it, at its beginning, and one that is being written."""
LATE = (
    "the loop's body changes the buffer {name} after the step's backward pass: where a rank dies before the body has ended, all restart from the "
    "last checkpoint"
)
FIRST = 2
"""The steps after which parameters are compared in any case: a loop that averages them does not do so after each step."""
SAMPLED = 3
"""Number of elements of each of three parameters that are compared, between ranks and with the end of the step."""

REPLICATED = LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler
"""Kinds of tracked objects beside modules and optimizers whose state is equal on all ranks."""


@dataclass
class Reached:
    """The steps and samples done, over all attempts."""

    step: int = 0
    samples: int = 0
    timed: dict[str, int] | None = None


class Checks(Protocol):
    """What the ranks, and an attempt and a checkpoint, must agree on (consistency.py)."""

    built: dict[str, Any]

    def refuse_unequal(self) -> None: ...
    def refuse_others(self, saved: Saved) -> None: ...
    def refuse_apart(self) -> None: ...


class Choice(Protocol):
    """Which evaluation is the best (evaluation.py)."""

    best: dict[str, Any] | None
    data: str | None


class Loop(Protocol):
    """A user's loop, as its services know it (loop_services.py)."""

    world: World
    tracked: Tracked
    means: RunningMeans
    running: Attempt
    reached: Reached

    @property
    def consistency(self) -> Checks: ...
    @property
    def evaluations(self) -> Choice: ...

    is_within: bool
    is_evaluating: bool
    owes_save: bool
    unfinished: list[int]

    def is_time_to_log(self) -> bool: ...
    def position(self) -> dict[str, Any]: ...
    def best_before(self, saved: Saved) -> dict[str, Any] | None: ...
    @property
    def begins(self) -> bool: ...
    def tell_once(self, what: str, text: str) -> None: ...


class JobHandOver(HandOver):
    """The state of one rank of a job between two attempts."""

    def __init__(self, survival: Survival | None = None):
        super().__init__(survival)
        self.has_worked = False
        """True if this process has begun to make steps: what it has outside of the tracked objects may remember them."""
        self.built: dict[str, Any] | None = None
        """The options with which the loop has built what it tracks, when this process called it first."""
        self.drawn: dict[str, Any] | None = None
        """What stands for the numbers that the script has drawn before it entered the job: see `drawn_so_far`."""
        self.seeded: int | None = None
        """The seed that the script has given torch before."""
        self.told: set[str] = set()
        """What the records tell once for all incarnations."""
        self.habits: dict[str, bool] = {}
        """What earlier attempts have learnt of the loop: see accumulation.py."""


class JobTrainee(Trainee):
    """What the loop of `services` trains, with the sums of its log."""

    key = "survive=True"

    def __init__(self, services: Loop, kept: JobHandOver):
        super().__init__(services.world, kept.survival)
        self._services: Loop = weakref.proxy(services)  # which holds this object, and goes with the group
        self._tracked, self._kept, self._habits = services.tracked, kept, kept.habits
        self._whole = self._left_to_compare = 0
        self._backward = -1
        self._common: list[Place] = []
        """The buffers as they were when the attempt began, if they were equal on all ranks."""
        self._point: list[float] = []
        self._hooks: list[RemovableHandle] = []
        self._plain: dict[str, Any] = {}
        self._with_gradients: list[str] = []
        self._has_buffers = self._is_handed = self._is_lost = self._is_unfinished = False
        self._told: list[str] = []

    def state(self) -> dict[str, Any]:
        return {**self._tracked.state(), **self._services.means.state()}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return self._tracked.targets(saved)

    def load(self, state: dict[str, Any]) -> None:
        self._services.means.load(state)
        self._tracked.load(state)

    def begin(self) -> None:
        self._kept.told = set()
        self._services.consistency.refuse_unequal()

    def resume(self, saved: Saved) -> None:
        self._kept.told = set()
        self._services.consistency.refuse_others(saved)
        self._services.evaluations.best = self._services.best_before(saved)
        restore(saved, self)
        self._services.means.logged |= saved.manifest.get("noted", {})  # of a checkpoint until 2026-11-29

    # In an attempt.

    @property
    def running(self) -> Attempt:
        return self._services.running

    def follow(self) -> None:
        super().follow()
        self._say_lost()
        self.running.records.repeat_body(self._told)
        self._tracked.accumulation.habits = self._habits
        buffers = self._tracked.buffers()
        told = self.world.gather([_why_not(self._tracked), hash_of(look([*buffers.values()]))])
        if why := next((why for why, _ in told if why), ""):
            self.refuse(why)
            return
        self._has_buffers = self._tracked.has_buffers
        self._left_to_compare = self._left_to_compare if self._is_handed else FIRST
        self._common = [*map(place, buffers.values())] if len({digest for _, digest in told}) == 1 else []
        self.changes = Changes(self._tracked.named.items(), self._tracked.optimizers.values())
        if self._has_buffers:
            trained = (each for each in self._tracked.parameters() if each.requires_grad)
            self._hooks = [each.register_hook(self._see_gradient) for each in trained]  # type: ignore[no-untyped-call]
        self._note()

    def _say_lost(self) -> None:
        """Record what is lost if the state was handed over and a rank has died in the body of its last step. Collective."""
        if not self._is_handed:
            return
        step = self._services.reached.step
        told = self.world.gather([self._is_unfinished, self._is_lost])
        dead = " and ".join(f"rank {rank}" for rank, (is_unfinished, _) in enumerate(told) if is_unfinished)
        if dead:
            loss = any(is_lost for _, is_lost in told)
            more = ": the next train line is without its loss of this step, and" if loss else ":"
            text = f"{dead} died before the end of the loop's body of step {step}{more} what it logged or did there after the step, such as writing a file, may be lost, and so may what it changed in buffers since its backward pass: if training reads them, other weights follow"
            self.running.records.event("note", step=step, text=text)

    def release(self) -> None:
        super().release()
        for hook in self._hooks:
            hook.remove()

    def end_step(self) -> None:
        """Note that a step and the loop's body have ended: the state is whole until a parameter changes. Collective."""
        if self._left_to_compare:  # also on a rank that has refused by itself: the others wait for it
            self._left_to_compare -= 1
            parameters, states = self._tracked.named, self._tracked.of_optimizers()
            for what, apart in (
                ("parameters", first_apart(parameters, self.world)),
                ("optimizers' states", first_apart(states, self.world)),
                ("optimizers' states", self._tracked.apart()),
            ):
                if self.world.lowest(bool(apart)) is not None:
                    if self._services.begins:  # a later attempt goes on with what the run has become
                        self._services.consistency.refuse_apart()
                    self.refuse(f"{what} differ between ranks, so no rank has those of another")
        if not self.is_followed:
            return
        is_seen = bool(self.changes.changed())
        if self._has_buffers and not self.journal.changes_late and self.are_changed():
            self._see_late_change()
        self.running.records.end_body()
        self._note()
        if not self._tracked.optimizers and not is_seen:
            self.refuse("a step has changed no parameter that torch could see: change them in place, and not by .data")

    def _note(self) -> None:
        services, step = self._services, self._services.reached.step
        self._whole, self.journal.whole = 2 * step, step
        self.changes.look()
        self._plain, self._point = self._tracked.plain(), _point(self._tracked.parameters())
        self._with_gradients = self._tracked.accumulation.with_gradients()
        self._write(self._whole, {"means": services.means.journal(), "point": self._point})

    def _see_gradient(self, _: Tensor) -> None:
        """Note the buffers before the first gradient of a backward pass is there: no part of the step's sum has left this rank.

        Hooks are on parameters: `copy.deepcopy`, `torch.save` and torch.compile leave them out, and would take a module's along.
        """
        if (backward := torch._C._current_graph_task_id()) != self._backward:
            self._backward = backward
            self.note_buffers()

    def note_buffers(self) -> None:
        """Note this rank's own buffers if they have changed, unless an evaluation uses rank 0's."""
        if self.is_followed and not self._services.is_evaluating and self.are_changed():
            self._write(self._whole + 1, {})

    def _see_late_change(self) -> None:
        """Remember if buffers have other values than in the step's last note: a body may swap weights and put them back."""
        _, noted = self.journal.read(self._whole + 1) or self.journal.read(self._whole) or ({}, {})
        if found := [name for name, each in self._tracked.buffers().items() if _differ(each, noted.get(name))]:
            self.journal.note_late_change()
            self._services.tell_once("late", LATE.format(name=found[0]))

    def are_changed(self) -> bool:
        """Return whether buffers have been changed or replaced since they were noted."""
        return [*map(place, self._tracked.buffers().values())] != self.noted

    def _write(self, number: int, facts: dict[str, Any]) -> None:
        self.note(number, facts, self._tracked.buffers() if self._has_buffers else {})

    # Between two attempts.

    @property
    def owes_save(self) -> bool:
        return self._services.owes_save

    def is_past_update(self) -> bool:
        return self._services.is_within

    def changed(self) -> str:
        """See `Trainee.changed`; empty also in the body of a counted step."""
        if self._services.is_within:
            return ""
        return self.changes.changed() or ("a parameter" if self._point != _point(self._tracked.parameters()) else "")

    def why_not_whole(self) -> str:
        if self._services.is_within:
            return f"rank {self.world.rank} was in the loop's body of step {self.running.step}, which it had counted"
        needed = [*filter(self._tracked.accumulation.needs, self._with_gradients)]
        if not needed:
            return ""
        of = f" of {needed[0]}" if needed[0] else ""
        return f"gradients{of} were left from step {self.running.step}, and no rank hands them on: unless the next step needs them, zero them at the step's end"

    def is_whole(self) -> bool:
        return not (self._tracked.accumulation.is_within() or self.why_not_whole())

    @property
    def best(self) -> dict[str, Any] | None:
        return self._services.evaluations.best

    def mark(self) -> list[int]:
        return [self._services.reached.step]

    def replica(self) -> dict[str, Any]:
        """Return copies: modules may outlive the function, and be built upon again. A body may have changed rates before its sum."""
        of_gradients = {GRADIENTS: {}, ZEROED: self._tracked.accumulation.zeroed(), FROZEN: self._tracked.frozen()}
        return {**host_copy(self._tracked.replica()), **self._plain, **of_gradients}

    def facts(self) -> dict[str, Any]:
        """See `Trainee.facts`. points: some of the parameters after this step and the one before."""
        services, step = self._services, self._services.reached.step
        noted = [self.journal.read(number) for number in (2 * step, 2 * step - 2)]
        return {
            "reached": [step, services.reached.samples],
            "is_logged": services.is_time_to_log(),
            "habits": self._habits,
            "said": sorted(self._kept.told),
            "logged": services.means.logged_since(noted[0][0]["means"] if noted[0] else {}),
            "logged_in_step": services.means.logged_since(
                noted[1][0]["means"] if noted[1] and not services.is_time_to_log() else {}
            ),
            "best": [services.evaluations.best, services.evaluations.data],
            "built": services.consistency.built,
            "unfinished": services.unfinished,
            "left_to_compare": self._left_to_compare,
            "evaluations": [*self.running.records.of_body, *self.running.records.told],
            "points": [each[0]["point"] if each else None for each in noted],
        }

    # In the next attempt.

    def take_over(self, state: dict[str, Any], facts: dict[str, Any], own: Mapping[str, Any]) -> None:
        """See `Trainee.take_over`. Raises RankLost also: a rank has parameters of its own, or its buffers after the step are unknown."""
        services, reached = self._services, self._services.reached
        reached.step, reached.samples = facts["reached"]
        self._habits.update(facts["habits"])
        self._kept.told = set(facts["said"])
        services.consistency.built = self._kept.built = facts["built"]
        services.unfinished = facts["unfinished"]
        services.evaluations.best, services.evaluations.data = facts["best"]
        self._left_to_compare = facts["left_to_compare"]
        noted = self._own(reached.step, is_logged=facts["is_logged"])
        self._check(reached.step, noted, facts["points"])
        assert noted
        journaled, buffers = noted
        self._tracked.load({**state, **buffers})
        services.means.put(journaled["means"])
        if self._is_unfinished:  # else it has noted all that is not repeated
            services.means.logged |= facts["logged_in_step"]
        services.means.logged |= own.get("logged", {})  # a survivor's own in any case
        self.unsure = sorted(services.means.logged) if self._is_unfinished and not own else []
        self._is_handed, self._told = True, facts["evaluations"]

    def _own(self, step: int, *, is_logged: bool) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return this rank's own sums and buffers after `step`; None if its journal lacks them."""
        if whole := self.journal.read(2 * step):
            return whole
        self._is_unfinished = True
        before, late = self.journal.read(2 * step - 2), self.journal.read(2 * step - 1)
        if before is None or (late is None and self.journal.is_torn(2 * step - 1)):
            return None
        self._is_lost = not is_logged
        own = before[0] if self._is_lost else {"means": {}}
        return own, late[1] if late else before[1]  # there is no later note if no buffer has changed

    def _check(self, step: int, own: Any, points: list[Any]) -> None:
        """Raise RankLost on all ranks if the state of one cannot be restored."""
        whole, before = self.journal.read(2 * step), self.journal.read(2 * step - 2)
        late = self.journal.read(2 * step - 1) or before
        own_points = [noted[0]["point"] if noted else None for noted in (whole, before)]
        both = [pair for pair in zip(own_points, points, strict=True) if None not in pair]
        is_apart = any(one != other for one, other in both)
        is_changed_late = bool(whole and late and any(_differ(whole[1][name], late[1].get(name)) for name in whole[1]))
        has_late = self.journal.read(2 * step - 1) is not None
        is_changed_late |= whole is None and self.journal.changes_late
        told = self.world.gather([own is None, is_apart, is_changed_late, whole is None, has_late])
        is_unlike = len({each[4] for each in told}) > 1  # a rank has made no backward pass
        missing, apart, changed, unfinished = ([rank for rank, each in enumerate(told) if each[n]] for n in range(4))
        if missing:
            raise RankLost(f"rank {missing[0]} left no journal of step {step}: all ranks restart", rank=missing[0])
        if apart:
            raise RankLost(
                f"rank {apart[0]} had parameters of its own, which nobody else has: all ranks restart", rank=apart[0]
            )
        if unfinished and (changed or is_unlike):
            raise RankLost(
                f"rank {unfinished[0]} died in step {step}, whose buffers change after the backward pass has begun, or without one: all ranks restart",
                rank=unfinished[0],
            )

    # When another rank is lost for good.

    def has_common_buffers(self) -> bool:
        return self._common == [*map(place, self._tracked.buffers().values())]

    def alone(self) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        check_finite(self._tracked.parameters(), self.running.step)
        unlogged = self._services.reached.samples - self.running.records.since_last()[0]
        return (
            {**self.replica(), **self._services.means.state_alone()},
            {**self._services.position(), "unlogged": unlogged},
            [],
        )


def _why_not(tracked: Tracked) -> str:
    """Return why a rank that dies ends all ranks; empty if its state is that of the others."""
    for name, other in tracked.others.items():
        if not isinstance(other, REPLICATED):
            return f"the state of {name}, a {type(other).__name__}, may differ between ranks"
    for name, optimizer in tracked.optimizers.items():
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return f"{name} is a {type(optimizer).__name__}, whose steps cannot be followed"
    if name := next((name for name, each in tracked.tensors().items() if in_pieces(each)), ""):
        return f"{name} is in pieces, of which each rank holds its own"
    if tracked.extra:
        return f"each rank has its own extra state of a module: {tracked.extra}"
    if hooks := hooks_with_state(tracked.modules.values()):
        return f"the communication hook {hooks[0][0]} has a state of each rank"
    return "a module is compiled" if tracked.are_compiled else ""


def _point(parameters: Sequence[Tensor]) -> list[float]:
    """Return some elements: they differ between ranks that train by themselves, and after any change."""
    some = list[Tensor]()
    for is_trained in (True, False):
        kind = [each for each in parameters if each.requires_grad == is_trained and each.numel()]
        some += [kind[at].detach().flatten()[:SAMPLED].double() for at in {0, len(kind) // 2, len(kind) - 1} if kind]
    return torch.cat(some).tolist() if some else []


def _differ(one: Tensor, other: Tensor | None) -> bool:
    return other is None or one.shape != other.shape or not torch.equal(one, other)


def seed_step(seed: int, world: World, step: int) -> None:
    """Seed the generators for this rank's part of a step, so that a rank that is restarted in place, or a resume, draws alike."""
    seed_generators(key_of(seed, world.rank, step, "step"), on_device=True)
