"""In-process restart of a user's loop: a supervisor, and a child that calls the loop, again after each death."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from muster.faults import agent, lost_output
from muster.faults.preemption import Preemption
from muster.job.bootstrap import Bootstrap, Parted
from muster.job.options import JobOptions
from muster.job.trainee import NOTES, JobHandOver
from muster.loggers.tensorboard import import_writer
from muster.process import STOP_SIGNALS, collect_garbage, end, is_supervised
from muster.recovery.journal import StepJournal
from muster.recovery.supervisor import journal_for, supervise
from muster.recovery.survival import Survival, why_no_survival
from muster.world import external_group
from muster.world.environment import Environment, leave_store
from muster.world.rendezvous.meeting import code_hash
from muster.world.rendezvous.network import store_for_supervisor

J = TypeVar("J", bound=JobOptions)


def run(job: J, enter: Callable[[J, Bootstrap], object]) -> None:
    """Call `enter(job, bootstrap)` in a child that is restarted in place if it dies by a signal. See `Job.run`.

    The script continues in the child to its end. This process ends as the child does.
    enter: takes part in an attempt by that bootstrap; it may get a copy of `job`.
    Raises SystemExit: the run is not done.
    """
    journal = journal_for(partial(_why_not, job), last=NOTES)
    if not isinstance(journal, StepJournal):
        enter(job, Bootstrap(job, why_no_survival=journal))
        return
    lost_output.endure()
    agent.die_with_it()
    preemption, before = Preemption(), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    preemption.install()
    code_hash()  # once for all incarnations
    was_frozen = gc.get_freeze_count()
    most, store = job.max_survivals_per_hour, store_for_supervisor()
    incarnation = supervise(journal, preemption=preemption, most_per_hour=most, store=store)
    if isinstance(incarnation, int):
        end(incarnation)
    code = _live(job, enter, JobHandOver(Survival(incarnation)), preemption)
    leave_store()  # also for a script that goes on after a failure
    if not was_frozen:
        gc.unfreeze()
    if code:
        raise SystemExit(code)
    preemption.uninstall()
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: set by something else than Python


def _live(job: J, enter: Callable[[J, Bootstrap], object], kept: JobHandOver, preemption: Preemption) -> int:
    """Take part in one attempt after another, until the run ends; return the exit code."""
    while True:
        attempt = dataclasses.replace(job)
        bootstrap = Bootstrap(attempt, preemption=preemption, kept=kept)
        try:
            enter(attempt, bootstrap)
        except Parted:
            continue
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else bool(end.code)
        if not bootstrap.has_parted:
            return 0
        del attempt, bootstrap
        collect_garbage()  # until the block has ended, the frames of the error held their functions, which may close over the model


def _why_not(options: JobOptions) -> str | None:
    if not options.survive or Environment.from_env().world_size == 1:
        return None
    if external_group.exists():
        return "the process group is not the job's own"
    if options.device_type != "cpu" and (options.device_type == "cuda" or Path("/dev/nvidiactl").exists()):
        return "it trains on GPUs"
    if is_supervised():
        return "the script has run another job before, whose threads are left"
    if not (why := why_no_survival()):
        # as torch's optimizers and DistributedDataParallel do: here, once for all incarnations
        importlib.import_module("torch._dynamo")
        if options.tensorboard and os.environ["RANK"] == "0":
            import_writer()
    return why
