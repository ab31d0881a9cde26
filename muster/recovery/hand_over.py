"""What one rank keeps from one attempt to the next when a rank dies and is restarted in place: see survival.py.

A survivor keeps its replica of the state and its last records. In the next attempt the furthest rank hands its state on, in
place of a checkpoint. If a rank is lost for good, one that is left saves its replica: see emergency_checkpoint.py.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.plain_values import dumps, loads
from muster.checkpoint.trained import SavedTensor
from muster.errors import RankLost, StorageError
from muster.faults.heartbeat import EMERGENCY
from muster.lease.open_folder import RunFolder
from muster.loggers.jsonl import NAME, tail
from muster.loggers.metrics import Metrics, is_same
from muster.process import without_sigchld
from muster.recovery.emergency_checkpoint import last_lines, save_emergency
from muster.recovery.survival import Survival, is_of_peer
from muster.recovery.trainee import Steps, Trainee
from muster.timing.clock import Times
from muster.world.environment import Environment
from muster.world.group import World, start
from muster.world.group_options import GroupOptions
from muster.world.rendezvous.network import Unheard

CHUNK_BYTES = 64 << 20
RECENT = 8
"""The number of last records that are handed on: rank 0 dies before it has written at most those of one step."""
Mark = list[int]
"""See `Trainee.mark`."""


class HandOver:
    """The state of one rank between two attempts. survival: None if nothing is handed on: another's death ends this rank."""

    def __init__(self, survival: Survival | None):
        self.survival = survival
        self.newest_step: int | None = None
        self.owes_save = False
        self.source: int | None = None
        """The rank whose state is handed on in this attempt."""
        self.mark: Mark | None = None
        self.why_lost = ""
        """Why this rank's state is not handed on; after `furthest`, why no rank's is."""
        self.state: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self._handed: dict[str, Any] = {}
        """The facts of rank `source`. This rank's own stay with its state: `source` may die while it hands on its own."""
        self.records: Metrics | None = None
        """The records of the attempt, or of the one before: as long as its state is handed on, they stay open."""
        self._unsure: list[str] = []
        """See `Trainee.unsure`."""
        self._closing: tuple[int, Times] = 0, Times()
        """The step of the attempt before, and the times since its last line, with which its records are closed."""
        self._trainee: Trainee | None = None
        """The attempt's, from its first step on."""
        self._furthest: Mark | None = None
        self._folder: RunFolder

    # In an attempt.

    def follow(self, trainee: Trainee, folder: RunFolder) -> None:
        """Note that this rank makes steps, and drop what it kept of the attempt before. Collective."""
        if (
            self.survival is None or trainee.world.store_keys.incarnations is None
        ):  # perhaps one rank alone cannot be restarted
            return
        trainee.follow()
        self.mark, self.state, self.why_lost = None, {}, ""
        self._trainee, self._folder = trainee, folder
        self.survival.is_past_update = trainee.is_past_update

    def open_records(self, opened: Callable[[], Metrics]) -> Metrics:
        """Return the records of the attempt before; if there are none, those of `opened`."""
        self.records = self.records or opened()
        return self.records

    def close_records(self) -> None:
        """Close the records of the attempt before: its state is not handed on."""
        if self.records:
            self.records.close(*self._closing)
        self.records = None

    # Between two attempts.

    def part(self, error: BaseException, survives: Callable[[BaseException], bool]) -> None:
        """Keep the state if the attempt `survives` a rank's death; save it if that rank is lost for good."""
        with without_sigchld():
            if survives(error):
                self.keep()
            elif is_of_peer(error):
                self.save_last_step()

    def keep(self) -> None:
        """Keep the state of the attempt, without communication; before its first step, keep that of the attempt before."""
        if self._trainee and self._trainee.is_followed:
            self._keep(self._trainee)
        self.release()

    def release(self) -> None:
        """Let go of what the attempt trains, whose modules may outlive it."""
        trainee, self._trainee = self._trainee, None
        if trainee:
            if self.survival:
                self.survival.is_past_update = None
            trainee.release()

    def _keep(self, trainee: Trainee) -> None:
        running = trainee.running
        self._closing = running.step, running.clock.rest()
        self.owes_save = running.checkpoints.give_up() or trainee.owes_save
        self.why_lost = _changed(trainee) or trainee.why_not_whole()
        if not self.why_lost and trainee.is_whole() and not (self.owes_save and trainee.unsaved_best):
            self.state, self.mark = trainee.replica(), trainee.mark()
            known = {
                "recent": [*running.records.recent][-RECENT:],
                "since_last": running.records.since_last(),
                "newest_step": running.checkpoints.newest_step,
            }
            self.facts = {**trainee.facts(), **known}

    # When another rank is lost for good.

    def save_last_step(self) -> None:
        """Save the last step, or wait for another rank that does. Every rank that is left must call it.

        The lost rank's part of the loss since the last `train` record is lost.
        """
        if (trainee := self._trainee) is None:
            return
        running = trainee.running
        running.enter(EMERGENCY)
        is_whole = trainee.is_followed and not _changed(trainee) and trainee.is_whole()
        can = is_whole and trainee.has_common_buffers() and self._folder.may_commit()
        save_emergency(
            running.world, self._folder, step=running.step, save=partial(_save_alone, trainee) if can else None
        )

    # In the next attempt.

    def meet(
        self,
        options: GroupOptions,
        environment: Environment,
        *,
        stopping: Callable[[], bool],
        prepare: Callable[[], object],
    ) -> World:
        """Meet the other ranks. Collective. Raises MusterError.

        prepare: called before, while the others wait, if this rank has met them in this launch.
        """
        survival = self.survival
        if survival is None:
            return start(options, environment, stopping=stopping)
        if survival.is_again:  # the others wait for it, and then stop together, at a step that is saved

            def stopping() -> bool:
                return False

        try:
            survival.announce(environment, timeout_s=options.start_timeout_s, stopping=stopping)
            if survival.is_again:
                prepare()
            return start(
                options, environment, stopping=stopping, membership=survival.membership, on_meeting=survival.meet
            )
        except Unheard as error:
            if survival.is_again:  # not the fault of a config: a restart may help
                raise RankLost(str(error)) from error
            raise

    def furthest(self, world: World) -> int | None:
        """Return the rank whose state is handed on; None if no rank has one. Collective."""
        self.source = None
        if not world.again:
            return None
        marks, reasons = zip(*world.gather((self.mark, self.why_lost)), strict=True)
        held = [rank for rank, mark in enumerate(marks) if mark]
        self.why_lost = "" if held else next(filter(None, reasons), "")
        self.source = max(held, key=lambda rank: (marks[rank], -rank)) if held else None
        self._furthest = None if self.source is None else marks[self.source]
        return self.source

    def hand_on(self, trainee: Trainee) -> None:
        """Load the state of the furthest rank into `trainee`, and this rank's own from its journal. Collective.

        Raises RankLost: a rank has no journal of the last step. Raises DataError: a rank has other data.
        """
        assert self.source is not None
        self._handed = trainee.world.broadcast(self.facts, source=self.source)
        found = spread(self.state, trainee.world, self.source)
        saved = {name: SavedTensor(each.shape, each.dtype) for name, each in found.items() if isinstance(each, Tensor)}
        filled = trainee.targets(saved)
        with torch.no_grad():
            for name, target in filled.items():
                target.copy_(found[name])
        trainee.take_over(found | filled, self._handed, self.facts if self.mark else {})
        self.newest_step, self._unsure = self._handed["newest_step"], trainee.unsure
        if self.mark is None:  # the others may die before this rank makes a step
            self.mark, self.state, self.facts = self._furthest, found, self._handed

    def go_on(self, running: Steps, folder: Path, *, save: Callable[[], object]) -> None:
        """Bring the records up to date, and repeat a save that was cut short on any rank. Collective."""
        world, records = running.world, running.records
        made_up = self._make_up_records(world, records, folder)
        for facts in self.deaths(world):
            records.event("survived", step=running.step, **facts)
        self.have_told()
        unsure, made_up = world.broadcast([self._unsure, made_up])
        lines = [f"the train line of step {step}" for step in made_up]
        if unsure or lines:
            of = [f"{', '.join(unsure)} in the next train line"] if unsure else []
            text = (
                f"rank 0 has died: what was logged for {' and '.join(lines + of)} may be rank {self.source}'s, or older"
            )
            records.event("note", step=running.step, text=text)
        if world.sum([float(self.owes_save)])[0]:
            save()
            self.owes_save = False

    def _make_up_records(self, world: World, records: Metrics, folder: Path) -> list[int]:
        """Return the steps of the `train` records that are now another rank's; empty except on rank 0."""
        known, recent = [*records.recent], self._handed["recent"]
        if world.is_first and not known:  # this process has just opened them
            _, known = tail(folder / NAME, until=partial(is_same, recent[0]) if recent else bool)
            records.recent.extend(known)
        made_up = records.make_up(recent, known=known)
        records.go_on(*self._handed["since_last"])
        return [record["step"] for record in made_up if record["kind"] == "train" and world.is_first]

    def have_told(self) -> None:
        """Note that `deaths` are recorded: it leaves them out from now on."""
        if self.survival:
            self.survival.told = True

    def deaths(self, world: World) -> list[dict[str, Any]]:
        """Return the ranks that have died since `have_told`, with the deaths on their hosts. Collective."""
        if self.survival is None or not world.again:
            return []
        own, died = self.survival.incarnation, None
        if own.died_of and not self.survival.told:
            died = [own.died_of, time.monotonic() - own.died_at, own.silent_s]
        members = world.gather([socket.gethostname(), own.number, died])
        on_host = Counter[str]()
        for host, number, _ in members:
            on_host[host] += number
        return [
            {
                "rank": rank,
                "host": host,
                "cause": died[0],
                "seconds": round(died[1], 3),
                "silent": round(died[2], 3),
                "deaths_on_host": on_host[host],
            }
            for rank, (host, _, died) in enumerate(members)
            if died
        ]


def _changed(trainee: Trainee) -> str:
    """Return why the state, neither that before a step nor that after it, must not be handed on; empty if it may."""
    name = trainee.changed()
    return f"rank {trainee.world.rank} had changed {name} since step {trainee.running.step}" if name else ""


def _save_alone(trainee: Trainee) -> None:
    running = trainee.running
    if trainee.unsaved_best:
        raise StorageError(f"the best checkpoint, of step {trainee.unsaved_best}, was still being written")
    state, position, lines = trainee.alone()
    beside = {"step": running.step, "recent": [*last_lines(running), *lines]}
    running.checkpoints.save_alone(state=state, position={**position, **beside})


def spread(state: Mapping[str, Any], world: World, source: int) -> dict[str, Any]:
    """Return the flat state of rank `source`, tensors and plain values by name. Collective."""
    is_source = world.rank == source
    tensors = {name: each.detach() for name, each in state.items() if isinstance(each, Tensor)} if is_source else {}
    data = dumps({name: value for name, value in state.items() if name not in tensors}) if is_source else b""
    heads = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
    heads, length = world.broadcast([heads, len(data)], source=source)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_source else torch.empty(length, dtype=torch.uint8)
    dist.broadcast(raw, source)
    found: dict[str, Any] = loads(raw.numpy().tobytes())
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
