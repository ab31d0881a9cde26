"""One attempt at a run, built in the order in which data flows: world, data, model, strategy, loop, checkpoint."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from muster.attempt.attempt import Attempt, open_checkpoints
from muster.attempt.intervals import Every, Intervals
from muster.attempt.lifecycle import Lifecycle
from muster.attempt.records import open_records, report
from muster.attempt.running_means import RunningMeans
from muster.attempt.start import Fresh, begin
from muster.checkpoint.weights import write_weights
from muster.errors import BadHost, ConfigError, Diverged, MusterError, say
from muster.faults.preemption import Preemption
from muster.lease.open_folder import RunFolder
from muster.process import freeze, keep_memory
from muster.recovery.survival import Survival, why_none_survives
from muster.sample_plan import Plan
from muster.timing.clock import Clock
from muster.train.callbacks.all import Callbacks
from muster.train.config.command_line import given
from muster.train.config.keys import Config, Dist
from muster.train.config.parts import build
from muster.train.data.load import origin_of_samples
from muster.train.evaluation import refuse_unevaluated
from muster.train.first_records import announced
from muster.train.in_process_restart import RunHandOver
from muster.train.loop import Run, save, train
from muster.train.models.initial import first_weights
from muster.train.models.model_json import note_model
from muster.train.numerics import kinds_of, set_numerics
from muster.train.objectives.build import build_measures
from muster.train.objectives.counted import refuse_divided
from muster.train.progress import Course, plan_of, steps_asked_for
from muster.train.resume import identity, reached, refuse_changes
from muster.train.settings import group_options, loggers_of, run_options, visit_of
from muster.train.strategies.base import Strategy, check_slices
from muster.train.strategies.recipe import recipe
from muster.train.strategies.step.optimizer_step import Stepping
from muster.train.strategies.step.skip_dynamo import stay_eager
from muster.train.strategies.supported_keys import check_honoured
from muster.train.throughput import throughput
from muster.train.trainee import Training
from muster.world.environment import Environment
from muster.world.group import World
from muster.world.rendezvous.meeting import meet


def attempt(
    config: Config | ConfigError,
    preemption: Preemption,
    survival: Survival | None = None,
    *,
    why_no_survival: str = "",
) -> int:
    """Run one attempt and return its exit code. A ConfigError in place of the config is reported on all ranks.

    With `survival`, the death of another rank is followed by the next attempt in this process; `why_no_survival` says why not, if
    the config asks for it.
    """
    kept = RunHandOver(survival)
    while True:
        with lifecycle(config, preemption, survival) as life:
            take_part(config, preemption, life, kept, why_no_survival=why_no_survival)
        if not life.has_parted:
            return life.exit_code


def take_part(
    config: Config | ConfigError, preemption: Preemption, life: Lifecycle, kept: RunHandOver, *, why_no_survival: str
) -> None:
    """Take part in one attempt, from the meeting of the ranks to the end. Raises MusterError, and what a user's code raises."""
    world, strategy = join(config, preemption, kept)
    assert isinstance(config, Config)
    life.meet(world, timeout_s=config.dist.timeout_s)
    if config.doctor and not world.again:
        consult(config, world)
    parts: Any = {"config": config, "world": world, "strategy": strategy, "why_no_survival": why_no_survival}
    with open_run(**parts, life=life, kept=kept) as (run, folder):
        carry_out(run, life, folder)


def lifecycle(config: Config | ConfigError, preemption: Preemption, survival: Survival | None) -> Lifecycle:
    if isinstance(config, ConfigError):
        return Lifecycle(Path("."), preemption)
    folder = Path(config.output_dir)
    return Lifecycle(folder, preemption, max_idle_attempts=config.max_idle_attempts, survival=survival)


def join(
    config: Config | ConfigError, preemption: Preemption, kept: RunHandOver | None = None
) -> tuple[World, Strategy]:
    """Build the strategy and form the process group. Collective. Raises ConfigError on all ranks if one rank's config is wrong."""
    environment = find_environment(config)
    try:
        if isinstance(config, ConfigError):
            raise config
        strategy: Strategy = build(config.strategy)
        check_slices(config, strategy, environment.world_size)
        strategy.check(config, environment.world_size)
        check_honoured(config, strategy)
    except ConfigError as error:
        timeout_s = Dist().start_timeout_s if isinstance(config, ConfigError) else config.dist.start_timeout_s
        meet(environment, alike=None, error=error, timeout_s=timeout_s, stopping=lambda: preemption.signalled)
        raise
    options, stopping = group_options(config), lambda: preemption.signalled
    return (kept or RunHandOver(None)).join(config, options, environment, stopping=stopping), strategy


def find_environment(config: Config | ConfigError) -> Environment:
    """Read rank and world size from the environment. Raises ConfigError; an invalid config is reported first."""
    if isinstance(config, Config):
        return Environment.from_env(config.dist.init_method)
    try:
        return Environment.from_env(str(given("dist.init_method", Dist().init_method)))
    except ConfigError:
        raise config from None


def consult(config: Config, world: World) -> None:
    """Run the doctor's quick checks. Collective.

    Raises ConfigError: a check fails. Raises BadHost: checks fail on one host of several, and nowhere else.
    """
    from muster.doctor.show import bad_host, wrong
    from muster.doctor.visit import examine

    results = examine(world, visit_of(config, quick=True))
    failed, warned = wrong(results)
    for line in warned:
        say(f"muster: doctor: {line}")
    said, host = world.broadcast(["; ".join(failed), bad_host(results)])
    if said:
        raise BadHost(f"the doctor: {said}", host=host) if host else ConfigError(f"the doctor: {said}")


@contextlib.contextmanager
def open_run(
    *,
    config: Config,
    world: World,
    strategy: Strategy,
    life: Lifecycle,
    kept: RunHandOver | None = None,
    why_no_survival: str = "",
) -> Iterator[tuple[Run, RunFolder]]:
    """Build all parts of a run and restore the newest checkpoint, or the state of the furthest rank that is alive. Collective. Raises MusterError."""
    kept = kept or RunHandOver(None)
    set_numerics(config)
    keep_memory(config.keep_memory)
    if not config.compile:
        stay_eager()
    data = kept.load_data(config, world)
    refuse_unevaluated(config, data)
    plan = plan_of(config, data)
    total_steps = steps_asked_for(config, plan)
    refusal = partial(refuse_changes, config, fingerprint=data.fingerprint, total_steps=total_steps)
    options, keep = run_options(config), config.checkpoint.keep
    start = begin(life, world, options, kept, refusal=refusal)
    folder = start.folder
    callbacks = Callbacks.of(config, data)
    measures = build_measures(config.metrics, world=world, sliced=config.virtual_world_size is not None)
    kinds = kinds_of(world) if config.virtual_world_size else []
    weights = first_weights(config, world) if isinstance(start, Fresh) else None
    made = recipe(config, data, plan, total_steps, world, measures=measures, weights=weights)
    refuse_divided(made.objective, config, parts=strategy.divides(world.size))
    strategy.build(made, world)
    life.on_end(strategy.close)
    callbacks.on_build(strategy)
    means = RunningMeans(world, slices=config.virtual_world_size)
    position = partial(reached, config, options, measures, world)
    training = Training(strategy, callbacks, means, data=data, plan=plan, reached=position, survival=kept.survival)
    start.restore(training)
    progress = training.progress
    if isinstance(strategy, Stepping):
        # a rank that saves alone has no other rank's generators
        are_restored = start.saved is not None and start.saved.manifest.get("drawn", True)
        strategy.draws.begin(config.seed, strategy.draws_as, are_restored=are_restored)
    world.on_first(partial(note_model, folder.path, config, data))
    life.restored(progress, report=partial(report, folder.path) if world.is_first and config.log.report else None)
    course = Course(data=data, plan=plan, total_steps=max(total_steps, progress.step), progress=progress)
    is_finished = folder.is_done and course.is_over
    opened = partial(
        open_records,
        folder.path,
        world,
        name=config.name,
        step=progress.lines,
        samples=plan.samples_before(progress.step),
        total_steps=course.total_steps,
        makers=loggers_of(config),
        progress=config.log.progress.name,
        evaluated=None if is_finished or not progress.step else progress.evaluated,
        rates=throughput(config, data, world).rates,
    )
    records = start.open_records(world, opened)
    facts = identity(config, data, course.total_steps, kinds) | {"averages": callbacks.averages}
    running = Attempt(
        peers=life.run(),
        progress=progress,
        total_steps=course.total_steps,
        records=records,
        checkpoints=open_checkpoints(
            options, folder=folder, world=world, records=records, keep=keep, facts=facts, newest_step=start.newest_step
        ),
        clock=Clock(strategy.waited_s),
        means=means,
        intervals=intervals_of(config, plan),
    )
    running.checkpoints.best = progress.best
    running.peers.heartbeat.phases.count_gradients(strategy.gradients_computed)
    run = Run(
        config=config,
        running=running,
        course=course,
        trained=training,
        strategy=strategy,
        counts=strategy.counts(made),
        callbacks=callbacks,
        measures=measures,
    )
    training.run = weakref.proxy(run)
    try:
        why_not = why_none_survives(run.world, why_no_survival)
        notes = announced(run, start.saved, kinds=kinds, frozen=made.in_evaluation, why_not=why_not)
        known = {"total_steps": run.total_steps, "samples_per_epoch": len(data.train)}
        start.tell(running, notes, save=partial(save, run), **known)
        kept.follow(training, folder)
        if not gc.isenabled():
            freeze()  # imported modules live to the end: the collector need not scan them again
            gc.enable()
        yield run, folder
    except RuntimeError as error:
        kept.part(error, life.survives)
        raise
    finally:
        callbacks.close()
        if not life.has_parted:
            running.close()


def intervals_of(config: Config, plan: Plan) -> Intervals:
    wanted, evaluates = config.checkpoint, config.eval.every_steps or plan.steps_per_epoch
    saves = (wanted.every_epochs or 0) * plan.steps_per_epoch or wanted.every_steps
    return Intervals(
        line=Every(config.log.every_steps, config.log.every_s),
        evaluation=Every(evaluates if isinstance(evaluates, int) else 0),
        save=Every(saves, wanted.every_s),
    )


def carry_out(run: Run, life: Lifecycle, folder: RunFolder) -> None:
    """Train to the end, unless the run has already finished. Collective. Raises MusterError, as `muster.train.loop.train` does."""
    if folder.is_done and run.is_over:
        run.records.event("done", step=run.step, note="finished already")
        life.end(run.running.ending(), report=False)
        return
    try:
        ending = train(run)
    except Diverged:  # raised on every rank at the same step, so all ranks' checkpoint writers are still alive
        run.running.settle()
        raise
    except MusterError as error:
        if error.of_data and (where := origin_of_samples(run.config, run.course.data.train)):
            raise type(error)(f"{error}; samples come from {where}") from error
        raise
    if not ending.preempted:
        finish(run, folder)
    life.end(ending)


def finish(run: Run, folder: RunFolder) -> None:
    """Write model.pt and best.json. Collective. Raises StorageError."""
    run.running.enter("finish")
    run.strategy.sync_parameters()
    run.callbacks.on_end(run)
    failure: MusterError | None
    failure = write_weights(folder.path / "model.pt", run.strategy.weights(), writes=run.world.is_first)
    best, checkpoints = run.progress.best, run.running.checkpoints
    is_supervised = best is not None and not checkpoints.has_failed(best["step"])
    if run.world.is_first and not failure:
        try:
            if best and is_supervised:  # may be from the last evaluation, which comes after the last save
                checkpoints.note_best(best)
            run.records.event_once("done", step=run.step, output_dir=str(folder.path))
        except MusterError as error:
            failure = error
    run.world.together(failure)
    if run.config.log.report:
        run.running.close()  # before the report, which has the last window
