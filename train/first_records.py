"""The beginning of an attempt, in metrics.jsonl and on the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muster.checkpoint.commit import Saved
from muster.data.fingerprint import note_of
from muster.errors import say
from muster.recovery.survival import WHY_NOT
from muster.train.evaluation import never_evaluated
from muster.train.loop import Run
from muster.train.progress import steps_asked_for
from muster.train.trainee import Training

MOST_NAMES = 8


def announced(run: Run, saved: Saved | None, *, kinds: list[str], frozen: Sequence[str], why_not: str) -> Iterator[str]:
    """Yield what metrics.jsonl tells of this attempt as it begins, and print the limits of what it guarantees.

    `saved`: the checkpoint that it begins with. `kinds`: processor kinds of the ranks (see `numerics.kind_of`); empty without
    `virtual_world_size`. `frozen`: names of the frozen modules that stay in evaluation mode. `why_not`: why a rank that dies ends
    all ranks, although dist.survive=true; empty if it is restarted in place.
    """
    plan, given = run.course.plan, steps_asked_for(run.config, run.course.plan)
    if run.strategy.caveat and run.world.is_first:
        say(f"muster: {run.strategy.caveat}")
    if plan.batch_size < (asked := run.config.batch_size):
        yield f"batch_size={asked} is more than the {plan.size} training samples: a step takes all of them"
    if given < run.step:
        yield f"the config asks for {given} steps, but {run.step} are done: there is nothing left to train"
    if run.course.data.test is None and (why := never_evaluated(run.config, run.course.data)):
        yield f"nothing is evaluated: {why}"
    if text := note_of(run.course.data.fingerprint):
        yield text
    if run.counts.note:
        yield run.counts.note
    if frozen:
        more = [f"{len(frozen) - MOST_NAMES} more"] if len(frozen) > MOST_NAMES else []
        names = ", ".join([*frozen[:MOST_NAMES], *more])
        yield f"frozen modules stay in evaluation mode: {names}; frozen_mode=train trains them as the others"
    manifest = saved.manifest if saved else {}
    yield from mixed_kinds(kinds, manifest.get("computes_on"))
    if why_not:
        yield WHY_NOT.format(key=Training.key, why=why_not)
    then, now = manifest.get("config", {}).get("micro_batch_size"), run.config.micro_batch_size
    if saved and then != now and run.world.is_first:
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
