"""What the trainer trains, as checkpoints and survival see it: a strategy with its callbacks, and the sums of the log.

A rank's journal has its own part of those sums and its buffers, before its part of a step's sum of gradients leaves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from muster.attempt.attempt import Attempt
from muster.attempt.running_means import RunningMeans
from muster.checkpoint.commit import Saved
from muster.checkpoint.manager import restore
from muster.checkpoint.tensor_versions import Changes, place
from muster.checkpoint.trained import SavedTensor, extra_of, own_prefix
from muster.data.stream import Stream
from muster.errors import RankLost
from muster.recovery.emergency_checkpoint import check_finite
from muster.recovery.survival import Survival
from muster.recovery.trainee import Trainee
from muster.sample_plan import Plan
from muster.train.callbacks.all import Callbacks
from muster.train.data.load import Data
from muster.train.loop import Run, add_to, epoch, is_time_to_evaluate, is_time_to_log, position
from muster.train.progress import ENDED, LOGGED, Progress
from muster.train.strategies.base import StepResult, Strategy
from muster.train.strategies.replicas.buffers import OBJECTIVE, differs
from muster.train.strategies.replicas.replicated import Replicas
from muster.train.strategies.state import GROUPS
from muster.train.strategies.step.virtual_ranks import SlicedStep


class Training(Trainee):
    """What the trainer trains. Only a built strategy with a replica on each rank can be followed.

    `reached`: returns the progress at a checkpoint, or before the first step, and seeds the generators. Collective.
    """

    key = "dist.survive=true"
    run: Run
    """The attempt, once it makes steps. Not held: it holds this object, and both go, with the group, once it is over."""

    def __init__(
        self,
        strategy: Strategy,
        callbacks: Callbacks,
        means: RunningMeans,
        *,
        data: Data,
        plan: Plan,
        reached: Callable[[Saved | None], Progress],
        survival: Survival | None = None,
    ):
        super().__init__(strategy.world, survival)
        self.strategy, self.callbacks, self.means, self.data, self.plan = strategy, callbacks, means, data, plan
        self.progress = Progress()
        """As it was restored or handed over, before the first step."""
        self._reached = reached
        self._begun = -1
        """The step whose beginning `changes` has seen."""

    def state(self) -> dict[str, Any]:
        return {**self.strategy.state(), **self.callbacks.state(), **self.means.state()}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return self.strategy.targets(saved) | self.callbacks.targets(saved)

    def load(self, state: dict[str, Any]) -> None:
        self.callbacks.load(state)
        self.means.load(state)
        others = ("callbacks/", "loop/", f"{own_prefix(self.world.rank)}loop/")
        self.strategy.load({name: value for name, value in state.items() if not name.startswith(others)})

    def begin(self) -> None:
        self.progress = self._reached(None)

    def resume(self, saved: Saved) -> None:
        self.progress = self._reached(saved)
        restore(saved, self)

    # In an attempt.

    @property
    def running(self) -> Attempt:
        return self.run.running

    @property
    def _replicas(self) -> Replicas:
        assert isinstance(self.strategy, Replicas)
        return self.strategy

    def follow(self) -> None:
        super().follow()
        strategy, step = self._replicas, self._replicas.optimizer_step
        self.changes = Changes(strategy.parameters().items(), [step.optimizer])
        step.before_sum, step.before_forward, step.after_update = self._note, self._see_begin, self._see_end
        self.journal.whole = self.run.step
        self._write(self.run.step - 1, {"means": self.means.journal()})
        self.noted = []  # a callback may set buffers before the first step
        if isinstance(self.data.train, Stream):
            self.refuse("each rank has its own place in a stream of samples")
        if extra := next(iter(extra_of(strategy.model.state_dict())), ""):
            self.refuse(f"each rank has its own extra state of the model: {extra}")

    def refuse(self, why: str) -> None:
        super().refuse(why)
        self._replicas.optimizer_step.before_sum = self._replicas.optimizer_step.before_forward = None

    def _note(self, step: int, loss: Tensor | None, metrics: Mapping[str, Tensor]) -> None:
        if (name := self.changes.changed_unseen()) and not self.changes.changed():
            self.refuse(f"the forward pass changes {name} by .data, which torch does not count")
            return
        own = {"loss": None if loss is None else float(loss), "metrics": {k: float(v) for k, v in metrics.items()}}
        counted = self.run.counts.seen
        seen = [float(each) for each in counted] if counted else None
        self._write(step, {"means": self.means.journal(), "seen": seen, **own})

    def _see_end(self, step: int) -> None:
        self.journal.whole = step + 1

    def _see_begin(self, step: int) -> None:
        """Remember what nothing but this step's update may change."""
        self._see_buffers(step)
        self.changes.look()
        self._begun = step

    def _see_buffers(self, step: int) -> None:
        """Do not survive any more if this rank's buffers have changed since they were noted, after the forward pass."""
        if not self.noted:
            return
        own = self._replicas.optimizer_step.buffers.own
        if [*map(place, own.values())] == self.noted:
            return
        _, noted = self.journal.read(step - 1) or ({}, {})
        if own.keys() != noted.keys() or any(_differ(own[name], noted[name]) for name in own):
            self.refuse("the model's buffers change outside of its forward pass")

    def _write(self, step: int, facts: dict[str, Any]) -> None:
        buffers = self._replicas.optimizer_step.buffers
        own = {} if buffers.agree or buffers.none_here() else buffers.own
        self.note(step, {**facts, "drawn": self._replicas.draws.are_used()}, own)

    # Between two attempts.

    def changed(self) -> str:
        return self.changes.changed() if self._begun == self.run.step else ""

    def is_whole(self) -> bool:
        """Return False also if something of the step, such as a callback, has happened in part."""
        return self.run.progress.stage >= ENDED and not self.run.callbacks.are_cut_short

    @property
    def best(self) -> dict[str, Any] | None:
        return self.run.progress.best

    def mark(self) -> list[int]:
        return [self.run.step, self.run.progress.stage, self.run.progress.evaluated]

    def replica(self) -> dict[str, Any]:
        """Return the state of the strategy and the callbacks; buffers are this rank's own."""
        self._leave_evaluation()
        return {**self._replicas.optimizer_step.replica(), **self.callbacks.state()}

    def _leave_evaluation(self) -> None:
        """Have callbacks give the model back its own weights."""
        if self.run.callbacks.are_within:  # only then: a callback may count its calls
            self.run.callbacks.on_checkpoint(self.run)

    def facts(self) -> dict[str, Any]:
        progress, step = self.run.progress, self._replicas.optimizer_step
        result = progress.result if progress.stage < LOGGED else None
        fields = [each.name for each in dataclasses.fields(progress) if each.name != "result"]
        noted = (self.journal.read(self.run.step - 1) or ({"means": {}}, {}))[0]["means"]
        return {
            "progress": {name: getattr(progress, name) for name in fields},
            "norm": float(result.grad_norm) if result else None,
            "loss": float(step.loss) if isinstance(step, SlicedStep) else None,
            "logged": self.means.logged_since({} if progress.logged == self.run.step else noted),
            "frozen": [name for name, each in self.strategy.parameters().items() if not each.requires_grad],
        }

    def release(self) -> None:
        """Also let go of the group: its connections, for whose end other ranks wait, close once nothing holds it."""
        super().release()
        self.run.progress.result = None
        step = self._replicas.optimizer_step
        step.before_sum = step.before_forward = step.after_update = None

    # In the next attempt.

    def take_over(self, state: dict[str, Any], facts: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Raises DataError also: a rank has other data."""
        remedy = "give every node the same data, see data.root"
        self.world.same("training data: fingerprint", self.data.fingerprint, remedy=remedy)
        self.progress = progress = Progress(**facts["progress"])
        self.load(state)
        step = self._replicas.optimizer_step
        for group, theirs in zip(step.optimizer.param_groups, state[GROUPS], strict=True):
            group.update({**theirs, "params": group["params"]})  # callbacks may have changed what the config sets
        for name, parameter in self.strategy.parameters().items():
            parameter.requires_grad_(name not in facts["frozen"])
        step.stand_at(progress.step)
        self.world.together(self._restore_own(progress, facts, own))
        if progress.stage < LOGGED and facts["norm"] is not None:
            progress.result = StepResult(torch.zeros(()), torch.tensor(facts["norm"]))

    def _restore_own(self, progress: Progress, of_all: dict[str, Any], kept: Mapping[str, Any]) -> RankLost | None:
        """Restore this rank's own sums and buffers at the step of `progress`; return the failure to do so."""
        rank, step = self.world.rank, progress.step
        if not (noted := self.journal.read(step - 1)):
            return RankLost(f"rank {rank} died twice at step {step}: all ranks restart", rank=rank)
        facts, buffers = noted
        self._replicas.optimizer_step.buffers.put(buffers)
        self._replicas.optimizer_step.buffers.forget()
        self.means.put(facts["means"])
        self._replicas.draws.used = facts["drawn"]
        if "loss" in facts:
            loss = facts["loss"] if facts["loss"] is not None else of_all["loss"] * self.world.is_first
            metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in facts["metrics"].items()}
            own = torch.tensor(loss, dtype=torch.float64)
            result = StepResult(own, own, skipped=progress.skipped_in_a_row > 0, metrics=metrics)
            samples, measures = self.plan.count(step - 1), self._replicas.optimizer_step.recipe.train_metrics
            add_to(self.means, result, samples=samples, seen=facts["seen"], is_first=rank == 0, measures=measures)
        if progress.logged == step:
            self.means.clear()
        self.means.logged |= of_all["logged"] | kept.get("logged", {})  # since the note; a survivor's own in any case
        self.unsure = [] if kept else sorted(self.means.logged)
        return None

    # When another rank is lost for good.

    def has_common_buffers(self) -> bool:
        """Where each rank has buffers of its own, DDP broadcasts rank 0's in the next step, but not those of the objective.

        An evaluation before that needs those of all, and so do the weights of a run that is over.
        """
        run, buffers = self.run, self._replicas.optimizer_step.buffers
        if not run.step or self.journal.read(run.step - 1) is None:
            return False
        if buffers.agree or buffers.none_here():
            return True
        are_broadcast = not any(name.startswith(OBJECTIVE) for name in buffers.own)
        return run.world.is_first and are_broadcast and not run.is_over and not is_time_to_evaluate(run)

    def alone(self) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """Buffers are those of the end of the step, which the next has changed. A line that was due at this step has no loss."""
        run = self.run
        self._leave_evaluation()
        check_finite(self._replicas.optimizer_step.parameters, run.step)
        facts, buffers = self.journal.read(run.step - 1) or ({}, {})
        self._replicas.optimizer_step.buffers.put(buffers)
        lines = [self._line_without_loss()] if run.progress.stage < LOGGED and is_time_to_log(run) else []
        state = {**self.replica(), **self.means.state_alone()}
        return state, {**position(run), "unlogged": self.means.samples, "drawn": facts["drawn"]}, lines

    def _line_without_loss(self) -> dict[str, Any]:
        run = self.run
        result, samples = run.progress.result, self.plan.samples_before(run.step)
        assert result
        since, seconds = run.records.since_last()
        known = {"kind": "train", "step": run.step, "epoch": epoch(run), "loss": None, "lr": run.strategy.lr}
        known |= {"grad_norm": float(result.grad_norm), "samples": samples}
        return {**known, "samples_per_s": round((samples - since) / seconds, 1), **self.means.take_logged()}


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or one.dtype != other.dtype or bool(differs(one, other).any())
