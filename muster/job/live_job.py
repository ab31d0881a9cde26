"""What a job whose loop is a user's own keeps from one attempt to the next when a rank dies: see hand_over.py.

Between two steps the state of a rank is whole: the optimizer's step is counted, and the loop's body has ended. A survivor
keeps its state if it has changed no parameter since then, as in a backward pass, which waits for the sum of the gradients. A
rank's notes have its own sums of the log, between two steps, and its own buffers, also after each forward pass: so before
its part of the step's sum leaves it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from muster.batches.fingerprint import hash_of, look
from muster.batches.generators import key_of, seed_generators
from muster.checkpoint.changes import Changes, Place, place
from muster.checkpoint.state import host_copy
from muster.dist.pieces import in_pieces
from muster.dist.world import World
from muster.errors import RankLost, one_line
from muster.faults.heartbeat import RESCUE
from muster.job.folder import RunFolder
from muster.job.hand_over import CHANGED, RECENT, HandOver
from muster.job.replicas import first_apart, hooks_with_state
from muster.job.rescue import check_finite, last_lines, rescue
from muster.job.survival import Survival, note_why_not
from muster.job.totals import NAME as TOTALS
from muster.job.tracked import FROZEN, GRADIENTS, ZEROED, Tracked

if TYPE_CHECKING:
    from muster.job.session import Session

KEY = "survive=True"
NOTES = 4
"""The last notes that are needed: at the end of a step, in the middle of it, at its beginning, and one that is being written."""
FIRST = 2
"""The steps after which parameters are compared in any case: a loop that averages them does not do so after each step."""
SAMPLED = 3
"""Number of elements of each of three parameters that are compared, between ranks and with the end of the step."""


class LiveJob(HandOver):
    """The state of one rank of a job between two attempts."""

    def __init__(self, survival: Survival):
        super().__init__(survival)
        self._session: Session | None = None
        """The attempt's, from the first step on; None once its state is kept, or is not to be."""
        self.has_worked = False
        """True if this process has begun to make steps: what it has outside of the tracked objects may remember them."""
        self.built: dict[str, Any] | None = None
        """The options with which the loop has built what it tracks, when this process called it first."""
        self._whole = self._left_to_compare = 0
        self._common: list[Place] = []
        """The buffers as they were when the attempt began, if they were equal on all ranks."""
        self._point: list[float] = []
        self._hooks: list[RemovableHandle] = []
        self._plain: dict[str, Any] = {}
        self._changes: Changes | None = None
        self._with_gradients: list[str] = []
        self._habits: dict[str, bool] = {}
        self._noted: list[Place] = []
        self._has_buffers = self._is_lost = False

    # In an attempt.

    def follow(self, session: Session) -> None:
        """Note from now on what only this rank knows. Collective: every rank must call it."""
        self.begin()
        self._session, self._changes, self.has_worked = session, None, True
        session.tracked.between.habits = self._habits  # of the attempts before
        buffers = session.tracked.buffers()
        told = session.world.gather([_why_not(session.tracked), hash_of(look([*buffers.values()]))])
        if why := next((why for why, _ in told if why), ""):
            self._refuse(why)
            return
        self._left_to_compare, self._has_buffers = FIRST, session.tracked.has_buffers
        self._common = [*map(place, buffers.values())] if len({digest for _, digest in told}) == 1 else []
        self._changes = Changes(session.tracked.named.items(), session.tracked.optimizers.values())
        if self._has_buffers:
            self._hooks = [each.register_forward_hook(self.note_buffers) for each in session.tracked.modules.values()]
        self._note()
        if not self.notes.modules:
            self.notes.modules = sorted(sys.modules)

    def end_step(self, session: Session) -> None:
        """Note that a step and the loop's body have ended: the state is whole, until a parameter changes.

        Collective: every rank must call it.
        """
        if self._left_to_compare:  # also on a rank that has refused by itself: the others wait for it
            self._left_to_compare -= 1
            for what, named in (
                ("parameters", session.tracked.named),
                ("optimizers' states", session.tracked.of_optimizers()),
            ):
                if session.world.lowest(bool(first_apart(named, session.world))) is not None:
                    self._refuse(f"{what} differ between ranks, so no rank has those of another")
        if self._session is None:
            return
        is_seen = self._changes is not None and bool(self._changes.changed())
        self._note()
        if not session.tracked.optimizers and not is_seen:
            self._refuse("a step has changed no parameter that torch could see: change them in place, and not by .data")

    def _note(self) -> None:
        assert self._session and self._changes
        session = self._session
        self._whole, self.notes.whole = 2 * session.reached.step, session.reached.step
        self._changes.look()
        self._plain, self._point = session.tracked.plain(), _point(session.tracked.parameters())
        self._with_gradients = session.tracked.between.with_gradients()
        own = {"totals": session.totals.own(), "noted": session.noted, "point": self._point}
        self._write(self._whole, own)

    def note_buffers(self, *_: Any) -> None:
        """Note this rank's own buffers if they have changed, unless an evaluation uses rank 0's."""
        if (
            self._session
            and not self._session.is_evaluating
            and [*map(place, self._session.tracked.buffers().values())] != self._noted
        ):
            self._write(self._whole + 1, {})

    def _write(self, number: int, facts: dict[str, Any]) -> None:
        assert self._session
        buffers = self._session.tracked.buffers() if self._has_buffers else {}
        try:
            self.notes.write(number, facts, buffers)
            self._noted = [*map(place, buffers.values())]
        except (ValueError, RuntimeError) as error:
            self._refuse(f"a rank's own buffers cannot be noted: {one_line(error)}")

    def _refuse(self, why: str) -> None:
        if self._session is None:
            return
        self.survival.refuse()
        note_why_not(self._session.running.records, why, key=KEY)
        self._session = None

    # Between two attempts.

    def keep(self) -> None:
        """Keep the state of the attempt, one of whose other ranks has died; no communication."""
        session, self._session = self._session, None
        for hook in self._hooks:
            hook.remove()
        if session is None:  # not yet at work: what was kept before stays
            return
        running, tracked, records = session.running, session.tracked, session.running.records
        self.owes_save = running.checkpoints.give_up() or session.owes_save
        self.why_lost, is_whole = self._changed(session), self._is_whole(session)
        self._changes = None  # which holds the parameters
        if not is_whole:
            return
        step = session.reached.step
        self.mark = [step]
        self.state = self._state_of(tracked)
        self.facts = {
            "reached": [session.reached.step, session.reached.samples],
            "recent": [*records.recent][-RECENT:],
            "since_last": records.since_last(),
            "newest_step": running.checkpoints.newest_step,
            "is_logged": session.is_time_to_log(),
            "habits": self._habits,
            "points": [
                noted[0]["point"] if noted else None for noted in map(self.notes.read, (2 * step, 2 * step - 2))
            ],
        }

    def _is_whole(self, session: Session) -> bool:
        """Return True if the state is that of the end of a step."""
        if self._changes is None or self._changed(session):
            return False
        between = session.tracked.between
        has_gradients = any(map(between.needs, self._with_gradients))
        return not (session.is_within or between.is_within() or has_gradients)

    def _changed(self, session: Session) -> str:
        """Return what this rank has changed since the step ended."""
        if self._changes is None or session.is_within:
            return ""
        name = self._changes.changed() or ("a parameter" if self._point != _point(session.tracked.parameters()) else "")
        return CHANGED.format(rank=session.world.rank, name=name, step=session.reached.step) if name else ""

    def _state_of(self, tracked: Tracked) -> dict[str, Any]:
        # Copies: modules may outlive the function, and be built upon again. A body may have changed rates before its sum.
        of_gradients = {GRADIENTS: {}, ZEROED: tracked.between.zeroed(), FROZEN: tracked.frozen()}
        return {**host_copy(tracked.replica()), **self._plain, **of_gradients}

    # When another rank is lost for good.

    def save_last_step(self, folder: RunFolder) -> None:
        """Save the last step, or wait for another rank that does. Every rank that is left must call it.

        A rank can if its state is that of the end of the step, and its buffers are those of all ranks: they have not
        changed in this attempt. The loss since the last `train` record is lost.
        """
        if (session := self._session) is None:
            return
        has_common_buffers = self._common == [*map(place, session.tracked.buffers().values())]
        can = has_common_buffers and self._is_whole(session) and folder.may_commit()
        session.running.enter(RESCUE)
        step = session.reached.step
        rescue(session.world, folder, step=step, save=partial(self._save_alone, session) if can else None)

    def _save_alone(self, session: Session) -> None:
        running = session.running
        check_finite(session.tracked.parameters(), running.step)
        unlogged = session.reached.samples - running.records.since_last()[0]
        beside = {"step": running.step, "recent": last_lines(running), "unlogged": unlogged}
        state = {**self._state_of(session.tracked), TOTALS: {}}
        running.checkpoints.save_alone(state=state, position={**session.position(), **beside})

    # In the next attempt.

    def restore(self, session: Session) -> tuple[int, int]:
        """Load the state of the furthest rank, and this rank's own from its notes; return the step and the samples done.

        Collective: every rank must call it.

        Raises:
            RankLost: a rank has not noted what only it knew, or has parameters of its own.
        """
        world, tracked, source = session.world, session.tracked, self.source
        assert source is not None
        self.facts = world.broadcast(self.facts, source=source)
        step, samples = self.facts["reached"]
        self._habits.update(self.facts["habits"])
        found = self.take(world, source, tracked.targets)
        own = self._own(step)
        self._check(world, step, own)
        assert own
        facts, buffers = own
        tracked.load({**found, **buffers})
        session.totals.put(facts["totals"])
        session.noted = facts["noted"]
        self.newest_step = self.facts["newest_step"]
        return step, samples

    def _own(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return this rank's own sums and buffers after `step`; None if it has not noted them."""
        self._is_lost = False
        if whole := self.notes.read(2 * step):
            return whole
        before, late = self.notes.read(2 * step - 2), self.notes.read(2 * step - 1)
        if before is None or (late is None and self.notes.is_torn(2 * step - 1)):
            return None
        self._is_lost = not self.facts["is_logged"]
        facts = before[0] if self._is_lost else {"totals": {}, "noted": {}}
        return facts, late[1] if late else before[1]  # there is no later note if no buffer has changed

    def _check(self, world: World, step: int, own: Any) -> None:
        """Raise RankLost on all ranks if the state of one cannot be put together."""
        whole, before = self.notes.read(2 * step), self.notes.read(2 * step - 2)
        late = self.notes.read(2 * step - 1) or before
        own_points = [noted[0]["point"] if noted else None for noted in (whole, before)]
        both = [pair for pair in zip(own_points, self.facts["points"], strict=True) if None not in pair]
        is_apart = any(one != other for one, other in both)
        is_changed_late = bool(whole and late and any(_differ(whole[1][name], late[1].get(name)) for name in whole[1]))
        told = world.gather([own is None, is_apart, is_changed_late, whole is None])
        missing, apart, changed, unfinished = ([rank for rank, each in enumerate(told) if each[n]] for n in range(4))
        if missing:
            raise RankLost(f"rank {missing[0]} left no notes of step {step}: all ranks restart", rank=missing[0])
        if apart:
            raise RankLost(
                f"rank {apart[0]} had parameters of its own, which nobody else has: all ranks restart", rank=apart[0]
            )
        if changed and unfinished:
            raise RankLost(
                f"rank {unfinished[0]} died in step {step}, whose buffers change after the forward pass: all ranks restart",
                rank=unfinished[0],
            )

    def go_on(self, session: Session) -> None:
        """Bring the records up to date, and repeat a save that was cut short. Collective: every rank must call it."""
        world, records, step = session.world, session.running.records, session.reached.step
        self.make_up_records(world, records, session.folder.path, are_kept=False)
        self.record(world, records, step)
        if (rank := world.lowest(self._is_lost)) is not None:
            text = f"rank {rank} has died before it could report its loss of step {step}: the next train line is without it"
            records.event("note", step=step, text=text)
        self.repeat_save(world, session.save)


def _why_not(tracked: Tracked) -> str:
    """Return why a rank that dies ends all ranks; empty if its state is that of the others."""
    replicated = LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler
    for name, other in tracked.others.items():
        if not isinstance(other, replicated):
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
    """Return some elements, which differ between ranks of which each trains by itself, and after any change."""
    some = list[Tensor]()
    for is_trained in (True, False):
        kind = [each for each in parameters if each.requires_grad == is_trained and each.numel()]
        some += [kind[at].detach().flatten()[:SAMPLED].double() for at in {0, len(kind) // 2, len(kind) - 1} if kind]
    return torch.cat(some).tolist() if some else []


def _differ(one: Tensor, other: Tensor | None) -> bool:
    return other is None or one.shape != other.shape or not torch.equal(one, other)


def seed_step(seed: int, world: World, step: int) -> None:
    """Seed the generators for this rank's part of a step: so a rank that is born again draws alike."""
    seed_generators(key_of(seed, world.rank, step, "step"), on_device=True)
