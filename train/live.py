"""What the trainer keeps from one attempt to the next when a rank dies and is born again: see muster/job/survival.py.

A survivor keeps its model, its optimizer and its records; a rank's notes have its own part of the sums of the log and its
buffers. In the next attempt the furthest rank hands its state on, in place of a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.batches.drawn import Watch
from muster.batches.stream import Stream
from muster.checkpoint.trained import EXTRA, SavedTensor
from muster.dist.options import GroupOptions
from muster.dist.place import Place
from muster.dist.rendezvous.network import Unheard
from muster.dist.world import World, alone, start
from muster.errors import RankLost, one_line, say
from muster.job.survival import Survival
from muster.loggers.jsonl import NAME, tail
from muster.loggers.metrics import Metrics, is_same
from muster.plan import Plan
from muster.process import handle_of
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
from muster.train.strategies.step.slices import SlicedStep
from muster.train.window import Window

CHUNK_BYTES = 64 << 20
KEPT = ("build", "state", "targets", "load", "sync_parameters")
"""Methods of a strategy that has the state of ddp, and no other."""
SLOW_S = 2.0
RECENT = 8
"""The number of last records that are handed on: rank 0 dies before it has written at most those of one step."""
Mark = list[int]
"""How far a rank has come: step, stage of the step, and step of the last evaluation. Marks are compared in this order."""


class Live:
    """The state of one rank between two attempts.

    Args:
        survival: how the rank survives.
    """

    def __init__(self, survival: Survival):
        self.survival, self.notes = survival, survival.notes
        self.data: Data | None = None
        self._loaded: Watch | None = None
        self.records: Metrics | None = None
        self.newest_step: int | None = None
        self.owes_save = False
        self._mark: Mark | None = None
        self._state: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._window: Window | None = None
        self._noted: list[tuple[int, int]] = []
        self._strategy: Replicas | None = None

    # In an attempt.

    def follow(self, run: Run) -> None:
        """Note from now on what only this rank knows of each step."""
        assert isinstance(run.strategy, Replicas)
        self._strategy, self._window, self.records = run.strategy, run.window, run.records
        self._mark, self._state = None, {}
        optimizer_step = run.strategy.optimizer_step
        optimizer_step.before_sum, optimizer_step.before_forward = self._note, self._see_buffers
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
        assert self._window
        own = {"loss": None if loss is None else float(loss), "metrics": {k: float(v) for k, v in metrics.items()}}
        self._write(step, {"window": self._window.own(), **own})

    def _see_buffers(self, step: int) -> None:
        """Do not survive any more if this rank's buffers have changed since they were noted, after the forward pass."""
        if not self._noted:
            return
        assert self._strategy
        own = self._strategy.optimizer_step.buffers.own
        if [(each.data_ptr(), each._version) for each in own.values()] == self._noted:
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
            self._noted = [(each.data_ptr(), each._version) for each in own.values()]
        except (ValueError, RuntimeError) as error:
            self._refuse(f"a rank's own buffers cannot be noted: {one_line(error)}")

    # Between two attempts.

    def keep(self, run: Run) -> None:
        """Keep the state of `run`, one of whose other ranks has died; no communication."""
        assert isinstance(run.strategy, Replicas)
        step, progress, checkpoints = run.strategy.optimizer_step, run.progress, run.running.checkpoints
        self.owes_save = checkpoints.give_up()
        best = progress.best["step"] if progress.best and self.owes_save else 0
        is_best_lost = (checkpoints.newest_step or 0) < best < progress.step  # nobody has that step's weights any more
        if progress.stage < ENDED or run.callbacks.are_cut_short or is_best_lost:  # not all of a callback has happened
            self._strategy = self._window = progress.result = None
            return
        if run.callbacks.are_within:  # only then: a callback may count its calls
            run.callbacks.on_checkpoint(run)
        result = progress.result if progress.stage < LOGGED else None
        self._mark = [progress.step, progress.stage, progress.evaluated]
        self._state = {**step.replica(), **run.callbacks.state()}
        self._facts = {
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
        self._strategy = self._window = progress.result = None  # which hold the group and its connections

    # In the next attempt.

    def join(self, config: Config, options: GroupOptions, place: Place, *, stopping: Callable[[], bool]) -> World:
        """Meet the other ranks, after this process has loaded the data if they have it. Collective. Raises MusterError."""
        survival = self.survival
        if survival.is_again:  # the others wait for it, and then stop together, at a step that is saved

            def stopping() -> bool:
                return False

        try:
            survival.announce(place, timeout_s=config.dist.start_timeout_s, stopping=stopping)
            if survival.is_again:
                with self._said_if_slow(place.rank):
                    self.load_data(config)
            return start(options, place, stopping=stopping, birth=survival.birth, on_meeting=survival.meet)
        except Unheard as error:
            if survival.is_again:  # not the fault of a config: a restart may help
                raise RankLost(str(error)) from error
            raise

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
        self._make_up_records(run.world, run.records, folder)
        self._record(run.world, run.records, run.step)
        if run.world.sum([float(self.owes_save)])[0]:
            self.owes_save = False
            save(run)

    def furthest(self, world: World) -> int | None:
        """Return the rank whose state is handed on; None if no rank has one. Collective: every rank must call it."""
        marks = world.gather(self._mark)
        held = [rank for rank, mark in enumerate(marks) if mark]
        return max(held, key=lambda rank: (marks[rank], -rank)) if held else None

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
        self._facts = world.broadcast(self._facts, source=source)
        world.same(
            "training data: fingerprint", data.fingerprint, remedy="give every node the same data, see data.root"
        )
        progress = Progress(**self._facts["progress"])
        found = spread(self._state, world, source)
        saved = {name: SavedTensor(each.shape, each.dtype) for name, each in found.items() if isinstance(each, Tensor)}
        targets = strategy.targets(saved) | callbacks.targets(saved)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(found[name])
        found |= targets
        callbacks.load(found)
        strategy.load({name: value for name, value in found.items() if not name.startswith("callbacks/")})
        for group, theirs in zip(strategy.optimizer_step.optimizer.param_groups, found[GROUPS], strict=True):
            group.update({**theirs, "params": group["params"]})  # callbacks may have changed what the config sets
        for name, parameter in strategy.parameters().items():
            parameter.requires_grad_(name not in self._facts["frozen"])
        strategy.optimizer_step.stand_at(progress.step)
        failure = self._restore_own(world, plan, progress, strategy, window)
        world.together(failure)
        if progress.stage < LOGGED and self._facts["norm"] is not None:
            progress.result = StepResult(torch.zeros(()), torch.tensor(self._facts["norm"]))
        self.newest_step = self._facts["newest_step"]
        self._state = {}
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
            loss = facts["loss"] if facts["loss"] is not None else self._facts["loss"] * world.is_first
            metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in facts["metrics"].items()}
            own = torch.tensor(loss, dtype=torch.float64)
            result = StepResult(own, own, skipped=progress.skipped_in_a_row > 0, metrics=metrics)
            window.add(result, samples=plan.count(progress.step - 1))
        if progress.logged == progress.step:
            window.clear()
        return None

    def _make_up_records(self, world: World, records: Metrics, folder: Path) -> None:
        """Write the last records that rank 0 has not written."""
        known, recent = [*records.recent], self._facts["recent"]
        if world.is_first and self.records is not records:
            _, known = tail(folder / NAME, until=partial(is_same, recent[0]) if recent else bool)
            records.recent.extend(known)
        records.make_up(recent, known=known)
        records.go_on(*self._facts["since_last"])

    def _record(self, world: World, records: Metrics, step: int) -> None:
        """Write which ranks have died, and how often ranks of the same host have. Collective: every rank must call it."""
        life, died = self.survival.life, None
        if life.died_of and not self.survival.told:
            died = [life.died_of, time.monotonic() - life.died_at]
        self.survival.told = True
        lives = world.gather([socket.gethostname(), life.number, died])
        deaths = Counter[str]()
        for host, number, _ in lives:
            deaths[host] += number
        for rank, (host, _, died) in enumerate(lives):
            if died:
                cause, seconds = died
                facts = {"rank": rank, "host": host, "cause": cause, "seconds": round(seconds, 3)}
                records.event("survived", step=step, **facts, deaths_on_host=deaths[host])


def spread(state: Mapping[str, Any], world: World, source: int) -> dict[str, Any]:
    """Return the flat state of rank `source`: its tensors and plain values by name. Collective: every rank must call it."""
    is_source = world.rank == source
    tensors = {name: each.detach() for name, each in state.items() if isinstance(each, Tensor)} if is_source else {}
    blob = io.BytesIO()
    torch.save({name: value for name, value in state.items() if name not in tensors}, blob)
    heads = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
    heads, length = world.broadcast([heads, blob.tell()], source=source)
    raw = (
        torch.frombuffer(bytearray(blob.getvalue()), dtype=torch.uint8)
        if is_source
        else torch.empty(length, dtype=torch.uint8)
    )
    dist.broadcast(raw, source)
    found: dict[str, Any] = torch.load(io.BytesIO(raw.numpy().tobytes()), weights_only=True)
    for chunk in _chunks(heads):
        size = sum(_bytes(head) for head in chunk)
        flat = torch.empty(size, dtype=torch.uint8)
        if is_source:
            torch.cat([tensors[name].contiguous().reshape(-1).view(torch.uint8) for name, *_ in chunk], out=flat)
        dist.broadcast(flat, source)
        parts = torch.split(flat, [_bytes(head) for head in chunk])
        for (name, kind, shape), part in zip(chunk, parts, strict=True):
            found[name] = tensors[name] if is_source else part.clone().view(getattr(torch, kind)).view(shape)
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or one.dtype != other.dtype or bool(differs(one, other).any())


def _bytes(head: Any) -> int:
    _, kind, shape = head
    size: int = math.prod(shape) * getattr(torch, kind).itemsize
    return size


def _chunks(heads: list[Any]) -> list[list[Any]]:
    """Divide the tensors into groups of at most `CHUNK_BYTES`; a larger tensor is a group of its own."""
    chunks, room = list[list[Any]](), 0
    for head in heads:
        if _bytes(head) > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(head)
        room -= _bytes(head)
    return chunks


def note_why_not(records: Metrics, why: str) -> None:
    """Record why a rank that dies ends all ranks, although dist.survive=true."""
    records.event("note", text=f"a rank that dies ends all ranks (dist.survive=true does not apply: {why})")


def why_not(config: Config) -> str:
    """Return why a rank that dies ends all ranks, although dist.survive=true; empty if it is born again."""
    if sys.platform != "linux":
        return "it needs Linux"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "ranks are not started by torchrun"
    try:
        os.close(handle_of(os.getpid()))
    except OSError as error:  # Linux before 5.3, or a container that forbids it
        return f"the system has no pidfd_open ({error.strerror})"
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
