"""What the trainer keeps from one attempt to the next when a rank dies and is born again: see muster/job/hand_over.py.

A survivor keeps its model, its optimizer and its records; a rank's notes have its own part of the sums of the log and its
buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.batches.drawn import Watch
from muster.batches.stream import Stream
from muster.checkpoint.changes import Changes, place
from muster.checkpoint.trained import EXTRA
from muster.dist.options import GroupOptions
from muster.dist.place import Place
from muster.dist.world import World, alone
from muster.errors import RankLost, one_line, say
from muster.job.hand_over import CHANGED, RECENT, HandOver
from muster.job.survival import Survival, note_why_not, why_no_survival
from muster.loggers.metrics import Metrics
from muster.plan import Plan
from muster.train.callbacks.all import Callbacks
from muster.train.config.keys import Config, Device, NonFinite, Precision
from muster.train.config.parts import locate
from muster.train.course import ENDED, LOGGED, Progress
from muster.train.data.load import Data, load
from muster.train.loop import Run, save
from muster.train.numerics import set_numerics
from muster.train.strategies.base import StepResult, Strategy
from muster.train.strategies.ddp import Ddp
from muster.train.strategies.replicas.buffers import differs
from muster.train.strategies.replicas.replicated import Replicas
from muster.train.strategies.single import Single
from muster.train.strategies.state import GROUPS
from muster.train.strategies.step.counts import Counts
from muster.train.strategies.step.slices import SlicedStep
from muster.train.window import Window

KEPT = ("build", "state", "targets", "load", "sync_parameters")
"""Methods of a strategy that has the state of ddp, and no other."""
SLOW_S = 2.0


class Live(HandOver):
    """The state of one rank between two attempts.

    Args:
        survival: how the rank survives.
    """

    def __init__(self, survival: Survival):
        super().__init__(survival)
        self.data: Data | None = None
        self._loaded: Watch | None = None
        self.records: Metrics | None = None
        self._window: Window | None = None
        self._counts: Counts | None = None
        self._noted: list[tuple[int, int]] = []
        self._strategy: Replicas | None = None
        self._changes: Changes | None = None
        self._begun = -1
        """The step whose beginning `_changes` has seen."""

    # In an attempt.

    def follow(self, run: Run) -> None:
        """Note from now on what only this rank knows of each step."""
        assert isinstance(run.strategy, Replicas)
        self._strategy, self._window, self.records = run.strategy, run.window, run.records
        self._counts = run.counts
        self._changes = Changes(run.strategy.parameters().items(), [run.strategy.optimizer_step.optimizer])
        self._begun = -1
        self.begin()
        optimizer_step = run.strategy.optimizer_step
        optimizer_step.before_sum, optimizer_step.before_forward = self._note, self._see_begin
        optimizer_step.after_update, self.notes.whole = self._see_end, run.step
        self._write(run.step - 1, {"window": run.window.own()})
        self._noted = []  # a callback may set buffers before the first step
        if isinstance(run.course.data.train, Stream):
            self._refuse("each rank has its own place in a stream of samples")
        if extra := next((name for name in run.strategy.model.state_dict() if name.rpartition(".")[2] == EXTRA), ""):
            self._refuse(f"each rank has its own extra state of the model: {extra}")
        if not self.notes.modules:
            self.notes.modules = sorted(sys.modules)

    def _refuse(self, why: str) -> None:
        self.survival.refuse()
        assert self._strategy and self.records
        self._strategy.optimizer_step.before_sum = self._strategy.optimizer_step.before_forward = None
        note_why_not(self.records, why)

    def _note(self, step: int, loss: Tensor | None, metrics: Mapping[str, Tensor]) -> None:
        assert self._window and self._counts and self._changes
        if (name := self._changes.changed_unseen()) and not self._changes.changed():
            self._refuse(f"the forward pass changes {name} by .data, which torch does not count")
            return
        own = {"loss": None if loss is None else float(loss), "metrics": {k: float(v) for k, v in metrics.items()}}
        seen = [float(each) for each in self._counts.seen] if self._counts.seen else None
        self._write(step, {"window": self._window.own(), "seen": seen, **own})

    def _see_end(self, step: int) -> None:
        self.notes.whole = step + 1

    def _see_begin(self, step: int) -> None:
        """Remember what nothing but this step's update may change."""
        assert self._changes
        self._see_buffers(step)
        self._changes.look()
        self._begun = step

    def changed(self, run: Run) -> str:
        """Return what the step that is not done has changed: the state is neither that before it nor that after it."""
        if self._changes is None or self._begun != run.step or not (name := self._changes.changed()):
            return ""
        return CHANGED.format(rank=run.world.rank, name=name, step=run.step)

    def _see_buffers(self, step: int) -> None:
        """Do not survive any more if this rank's buffers have changed since they were noted, after the forward pass."""
        if not self._noted:
            return
        assert self._strategy
        own = self._strategy.optimizer_step.buffers.own
        if [*map(place, own.values())] == self._noted:
            return
        _, noted = self.notes.read(step - 1) or ({}, {})
        if own.keys() != noted.keys() or any(_differ(own[name], noted[name]) for name in own):
            self._refuse("the model's buffers change outside of its forward pass")

    def _write(self, step: int, facts: dict[str, Any]) -> None:
        """Note this rank's own part of a step, and remember address and version of each buffer in it."""
        assert self._strategy
        buffers = self._strategy.optimizer_step.buffers
        drawn = self._strategy.draws.are_used()
        own = {} if buffers.agree or buffers.none_here() else buffers.own
        try:
            self.notes.write(step, {**facts, "drawn": drawn}, own)
            self._noted = [*map(place, own.values())]
        except (ValueError, RuntimeError) as error:
            self._refuse(f"a rank's own buffers cannot be noted: {one_line(error)}")

    # Between two attempts.

    def keep(self, run: Run) -> None:
        """Keep the state of `run`, one of whose other ranks has died; no communication."""
        assert isinstance(run.strategy, Replicas)
        step, progress, checkpoints = run.strategy.optimizer_step, run.progress, run.running.checkpoints
        self.owes_save = checkpoints.give_up()
        best = progress.best["step"] if progress.best and self.owes_save else 0
        self.why_lost, self._changes = self.changed(run), None  # which holds the parameters
        is_best_lost = (checkpoints.newest_step or 0) < best < progress.step  # nobody has that step's weights any more
        is_within = progress.stage < ENDED or run.callbacks.are_cut_short  # not all of a callback has happened
        if is_within or is_best_lost or self.why_lost:
            self._strategy = self._window = self._counts = progress.result = None
            return
        if run.callbacks.are_within:  # only then: a callback may count its calls
            run.callbacks.on_checkpoint(run)
        result = progress.result if progress.stage < LOGGED else None
        self.mark = [progress.step, progress.stage, progress.evaluated]
        self.state = {**step.replica(), **run.callbacks.state()}
        self.facts = {
            "progress": {
                each.name: getattr(progress, each.name)
                for each in dataclasses.fields(progress)
                if each.name != "result"
            },
            "norm": float(result.grad_norm) if result else None,
            "loss": float(step.loss) if isinstance(step, SlicedStep) else None,
            "recent": [*run.records.recent][-RECENT:],
            "since_last": run.records.since_last(),
            "newest_step": checkpoints.newest_step,
            "fingerprint": run.course.data.fingerprint,
            "frozen": [name for name, each in run.strategy.parameters().items() if not each.requires_grad],
        }
        self._strategy = self._window = self._counts = progress.result = (
            None  # which hold the group and its connections
        )

    # In the next attempt.

    def join(self, config: Config, options: GroupOptions, place: Place, *, stopping: Callable[[], bool]) -> World:
        """Meet the other ranks, after this process has loaded the data if they have it. Collective. Raises MusterError."""

        def prepare() -> None:
            with self._said_if_slow(place.rank):
                self.load_data(config)

        return self.meet(options, place, stopping=stopping, prepare=prepare)

    @contextlib.contextmanager
    def _said_if_slow(self, rank: int) -> Iterator[None]:
        """Say that the others wait for the data of this rank, if that takes longer than `SLOW_S`."""
        text = f"muster: rank {rank} has died ({self.survival.life.died_of}) and loads its data again: the others wait for it"
        told = threading.Timer(SLOW_S, say, [text])
        told.daemon = True
        told.start()
        try:
            yield
        finally:
            told.cancel()

    def load_data(self, config: Config, world: World | None = None) -> Data:
        """Return the data, and leave the generators as they were once it was loaded: a data set may draw, and a model after it.

        A survivor has the data. A newborn loads it without the others (`world` is None), who do not load it again.
        """
        if self.data is None:
            set_numerics(config)
            self.data = load(config, world or alone(torch.device("cpu")))
            self._loaded = Watch()
        assert self._loaded
        self._loaded.restore()
        return self.data

    def go_on(self, run: Run, folder: Path) -> None:
        """Bring the records up to date, and repeat a save that was cut short. Collective: every rank must call it."""
        self.make_up_records(run.world, run.records, folder, are_kept=self.records is run.records)
        self.record(run.world, run.records, run.step)
        self.repeat_save(run.world, partial(save, run))

    def hand_over(
        self,
        source: int,
        world: World,
        data: Data,
        plan: Plan,
        strategy: Strategy,
        callbacks: Callbacks,
        window: Window,
    ) -> Progress:
        """Load the state of rank `source`, and this rank's own from its notes. Collective: every rank must call it.

        Raises:
            RankLost: a rank has no notes of the last step.
            DataError: a rank has other data.
        """
        assert isinstance(strategy, Replicas)
        self.facts = world.broadcast(self.facts, source=source)
        world.same(
            "training data: fingerprint", data.fingerprint, remedy="give every node the same data, see data.root"
        )
        progress = Progress(**self.facts["progress"])
        found = self.take(world, source, lambda saved: strategy.targets(saved) | callbacks.targets(saved))
        callbacks.load(found)
        strategy.load({name: value for name, value in found.items() if not name.startswith("callbacks/")})
        for group, theirs in zip(strategy.optimizer_step.optimizer.param_groups, found[GROUPS], strict=True):
            group.update({**theirs, "params": group["params"]})  # callbacks may have changed what the config sets
        for name, parameter in strategy.parameters().items():
            parameter.requires_grad_(name not in self.facts["frozen"])
        strategy.optimizer_step.stand_at(progress.step)
        failure = self._restore_own(world, plan, progress, strategy, window)
        world.together(failure)
        if progress.stage < LOGGED and self.facts["norm"] is not None:
            progress.result = StepResult(torch.zeros(()), torch.tensor(self.facts["norm"]))
        self.newest_step = self.facts["newest_step"]
        return progress

    def _restore_own(
        self, world: World, plan: Plan, progress: Progress, strategy: Replicas, window: Window
    ) -> RankLost | None:
        """Restore this rank's own sums and buffers at the step of `progress`; return the failure to do so."""
        if not (noted := self.notes.read(progress.step - 1)):
            return RankLost(f"rank {world.rank} died twice at step {progress.step}: all ranks restart", rank=world.rank)
        facts, buffers = noted
        strategy.optimizer_step.buffers.put(buffers)
        strategy.optimizer_step.buffers.forget()
        window.load_own(facts["window"])
        strategy.draws.used = facts["drawn"]
        if "loss" in facts:
            loss = facts["loss"] if facts["loss"] is not None else self.facts["loss"] * world.is_first
            metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in facts["metrics"].items()}
            own = torch.tensor(loss, dtype=torch.float64)
            result = StepResult(own, own, skipped=progress.skipped_in_a_row > 0, metrics=metrics)
            window.add(result, samples=plan.count(progress.step - 1), seen=facts["seen"])
        if progress.logged == progress.step:
            window.clear()
        return None


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or one.dtype != other.dtype or bool(differs(one, other).any())


def why_not(config: Config) -> str:
    """Return why a rank that dies ends all ranks, although dist.survive=true; empty if it is born again."""
    if why := why_no_survival():
        return why
    if not _is_replicated(locate(config.strategy)):
        return f"strategy={_name(config.strategy.target)} does not hand on its state"
    reasons = {
        "compile=true": config.compile,
        "device=cuda": config.device is Device.cuda,
        "device=auto on a host with GPUs": config.device is Device.auto and Path("/dev/nvidiactl").exists(),
        "on_nonfinite=skip": config.on_nonfinite is NonFinite.skip,
        "precision=fp16": config.precision is Precision.fp16,
        "strategy.compression=powersgd": config.strategy.values.get("compression") == "powersgd",
        "dist.init_method other than env://": config.dist.init_method != "env://",
    }
    return next((said for said, is_so in reasons.items() if is_so), "")


def _name(target: str) -> str:
    """Return a strategy as a user names it: one of the kit by the file that it is in."""
    return target.rsplit(".", 2)[1] if target.startswith("muster.train.strategies.") else target


def _is_replicated(strategy: Any) -> bool:
    """Return whether a strategy is ddp or single, or one of a user's own that adds nothing to their state."""
    return isinstance(strategy, type) and any(
        issubclass(strategy, kind) and all(getattr(strategy, name) is getattr(kind, name) for name in KEPT)
        for kind in (Ddp, Single)
    )
