"""The beginning of an attempt, in metrics.jsonl and on the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muster.batches.fingerprint import note_of
from muster.errors import say
from muster.job.folder import RunFolder
from muster.job.records import record_start
from muster.job.rescue import make_up
from muster.train.course import steps_asked_for
from muster.train.evaluation import never_evaluated
from muster.train.loop import Run

MOST_NAMES = 8


def announce(
    run: Run,
    folder: RunFolder,
    *,
    kinds: list[str],
    deaths: Sequence[Mapping[str, Any]],
    why_lost: str,
    in_evaluation: Sequence[str] = (),
) -> None:
    """Write to metrics.jsonl how this attempt begins, and print the limits of what it guarantees.

    kinds: processor kinds of the ranks (see `numerics.kind_of`); empty without `virtual_world_size`. deaths, why_lost: see
    `record_start`.
    in_evaluation: names of the frozen modules that stay in evaluation mode.
    """
    world = run.world
    if run.strategy.caveat and world.is_first:
        say(f"muster: {run.strategy.caveat}")
    if run.course.plan.batch_size < run.config.batch_size:
        asked, there = run.config.batch_size, run.course.plan.size
        run.records.event(
            "note", text=f"batch_size={asked} is more than the {there} training samples: a step takes all of them"
        )
    given = steps_asked_for(run.config, run.course.plan)
    if given < run.step:
        run.records.event(
            "note", text=f"the config asks for {given} steps, but {run.step} are done: there is nothing left to train"
        )
    if run.course.data.test is None and (why := never_evaluated(run.config, run.course.data)):
        run.records.event("note", text=f"nothing is evaluated: {why}")
    if text := note_of(run.course.data.fingerprint):
        run.records.event("note", text=text)
    if run.counts.note:
        run.records.event("note", text=run.counts.note)
    if in_evaluation:
        more = [f"{len(in_evaluation) - MOST_NAMES} more"] if len(in_evaluation) > MOST_NAMES else []
        names = ", ".join([*in_evaluation[:MOST_NAMES], *more])
        run.records.event(
            "note", text=f"frozen modules stay in evaluation mode: {names}; frozen_mode=train trains them as the others"
        )
    for text in mixed_kinds(kinds, folder.saved.manifest.get("computes_on") if folder.saved else None):
        run.records.event("note", text=text)
    known = {"total_steps": run.total_steps, "samples_per_epoch": len(run.course.data.train)}
    record_start(run.records, folder, world, step=run.step, deaths=deaths, why_lost=why_lost, **known)
    if folder.saved is None:
        return
    make_up(run.running, folder)
    then, now = folder.saved.manifest.get("config", {}).get("micro_batch_size"), run.config.micro_batch_size
    if then != now and world.is_first:
        say(
            f"muster: micro_batch_size={now} was {then}: batch norm and dropout see different micro-batches from here on"
        )


def mixed_kinds(kinds: list[str], then: list[str] | None) -> Iterator[str]:
    """Yield why virtual_world_size may not give one hash: ranks, or attempts (`then`: earlier), round differently."""
    asked = "virtual_world_size gives one hash of the weights for one kind of processor and one torch"
    if len(kinds) > 1:
        yield f"{asked}, but the ranks compute on {'; '.join(kinds)}: another assignment of slices to them gives another hash"
    elif kinds and then and kinds != then:
        yield f"{asked}; up to this checkpoint it was {'; '.join(then)}, now it is {kinds[0]}: the hash will be another"
