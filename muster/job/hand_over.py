"""What one rank keeps from one attempt to the next when a rank dies and is born again: see survival.py.

A survivor keeps its replica of the state and its last records. In the next attempt the furthest rank hands its state on, in
place of a checkpoint.
"""

from __future__ import annotations

import io
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

from muster.checkpoint.trained import SavedTensor
from muster.dist.options import GroupOptions
from muster.dist.place import Place
from muster.dist.rendezvous.network import Unheard
from muster.dist.world import World, start
from muster.errors import RankLost
from muster.job.survival import Survival
from muster.loggers.jsonl import NAME, tail
from muster.loggers.metrics import Metrics, is_same

CHUNK_BYTES = 64 << 20
RECENT = 8
"""The number of last records that are handed on: rank 0 dies before it has written at most those of one step."""
CHANGED = "rank {rank} had changed {name} since step {step}"
Mark = list[int]
"""How far a rank has come: its step, and what it has done of it. Marks are compared in this order."""


class HandOver:
    """The state of one rank between two attempts.

    Args:
        survival: how the rank survives.
    """

    def __init__(self, survival: Survival):
        self.survival, self.notes = survival, survival.notes
        self.newest_step: int | None = None
        self.owes_save = False
        self.source: int | None = None
        """The rank whose state is handed on in this attempt."""
        self.mark: Mark | None = None
        self.why_lost = ""
        """What keeps a state from being handed on: this rank's, and after `furthest` any rank's if none has one."""
        self.state: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    def begin(self) -> None:
        """Take notice that this rank makes steps in an attempt: what was kept of the one before is over."""
        self.mark, self.state, self.why_lost = None, {}, ""

    def meet(
        self, options: GroupOptions, place: Place, *, stopping: Callable[[], bool], prepare: Callable[[], object]
    ) -> World:
        """Meet the other ranks. Collective. Raises MusterError.

        prepare: is called before, while the others wait, if this rank has met them in this launch.
        """
        survival = self.survival
        if survival.is_again:  # the others wait for it, and then stop together, at a step that is saved

            def stopping() -> bool:
                return False

        try:
            survival.announce(place, timeout_s=options.start_timeout_s, stopping=stopping)
            if survival.is_again:
                prepare()
            return start(options, place, stopping=stopping, birth=survival.birth, on_meeting=survival.meet)
        except Unheard as error:
            if survival.is_again:  # not the fault of a config: a restart may help
                raise RankLost(str(error)) from error
            raise

    def furthest(self, world: World) -> int | None:
        """Return the rank whose state is handed on; None if no rank has one. Collective: every rank must call it."""
        marks, reasons = zip(*world.gather((self.mark, self.why_lost)), strict=True)
        held = [rank for rank, mark in enumerate(marks) if mark]
        self.why_lost = "" if held else next(filter(None, reasons), "")
        self.source = max(held, key=lambda rank: (marks[rank], -rank)) if held else None
        return self.source

    def take(
        self, world: World, source: int, targets: Callable[[Mapping[str, SavedTensor]], dict[str, Tensor]]
    ) -> dict[str, Any]:
        """Return the flat state of rank `source`, its tensors copied into those that `targets` returns for them. Collective."""
        found = spread(self.state, world, source)
        saved = {name: SavedTensor(each.shape, each.dtype) for name, each in found.items() if isinstance(each, Tensor)}
        filled = targets(saved)
        with torch.no_grad():
            for name, target in filled.items():
                target.copy_(found[name])
        return found | filled

    def repeat_save(self, world: World, save: Callable[[], object]) -> None:
        """Repeat a save that was cut short on any rank. Collective: every rank must call it."""
        if world.sum([float(self.owes_save)])[0]:
            self.owes_save = False
            save()

    def make_up_records(self, world: World, records: Metrics, folder: Path, *, are_kept: bool) -> None:
        """Write the last records that rank 0 has not written. are_kept: `records` are those of the attempt before."""
        known, recent = [*records.recent], self.facts["recent"]
        if world.is_first and not are_kept:
            _, known = tail(folder / NAME, until=partial(is_same, recent[0]) if recent else bool)
            records.recent.extend(known)
        records.make_up(recent, known=known)
        records.go_on(*self.facts["since_last"])

    def record(self, world: World, records: Metrics, step: int) -> None:
        """Write which ranks have died, and how often ranks of the same host have. Collective: every rank must call it."""
        for facts in self.deaths(world):
            records.event("survived", step=step, **facts)

    def deaths(self, world: World) -> list[dict[str, Any]]:
        """Return the deaths that are not told yet, and tell them no more. Collective: every rank must call it."""
        life, died = self.survival.life, None
        if life.died_of and not self.survival.told:
            died = [life.died_of, time.monotonic() - life.died_at]
        self.survival.told = True
        lives = world.gather([socket.gethostname(), life.number, died])
        on_host = Counter[str]()
        for host, number, _ in lives:
            on_host[host] += number
        return [
            {
                "rank": rank,
                "host": host,
                "cause": died[0],
                "seconds": round(died[1], 3),
                "deaths_on_host": on_host[host],
            }
            for rank, (host, _, died) in enumerate(lives)
            if died
        ]


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
