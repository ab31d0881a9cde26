"""One attempt at a run, built in the order in which data flows: world, data, model, strategy, loop, checkpoint."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from train import attempts
from train.callbacks.all import Callbacks
from train.changes import refuse_changes
from train.checkpoint import manager as checkpoint
from train.checkpoint.download import local_copy
from train.checkpoint.manager import Checkpoints
from train.checkpoint.records import read_best
from train.checkpoint.storage import Saved
from train.checkpoint.weights import read_weights, write_weights
from train.config.command_line import given
from train.config.differences import to_dict
from train.config.keys import Config, Dist
from train.config.parts import build, callable_of, locate, signature
from train.data.load import Data
from train.data.load import load as load_data
from train.dist.meeting import meet
from train.dist.place import Place, asked_for
from train.dist.world import World, start
from train.errors import ConfigError, Diverged, MusterError, StorageError, one_line, say
from train.faults.preemption import Preemption
from train.job.folder import RunFolder
from train.job.lifecycle import Ending, Lifecycle
from train.loggers.metrics import Metrics
from train.loop import Course, Meters, Progress, Run, train
from train.models.prepare import prepared
from train.objectives.build import build_measures, build_objective
from train.objectives.measure import Measures, is_better
from train.optim.build import Named, build_optimizer, grouped_options
from train.optim.schedule import adapt, build_schedule
from train.origin import defined
from train.outputs import open_loggers
from train.plan import Plan
from train.report.page import write_report
from train.settings import group_options, run_options, visit_of
from train.strategies.base import Recipe, Strategy, check_slices
from train.strategies.common.broadcast import begin_alike
from train.strategies.common.eager import stay_eager
from train.strategies.honours import check_honoured
from train.timing.clock import Clock
from train.timing.record import Timing, environment
from train.window import Window

SETTLE_S = 10.0


def attempt(config: Config | ConfigError, preemption: Preemption) -> int:
    """Run one attempt and return its exit code. A ConfigError in place of the config is reported on all ranks."""
    with lifecycle(config, preemption) as life:
        world, strategy = join(config, preemption)
        assert isinstance(config, Config)
        life.meet(world, timeout_s=config.dist.timeout_s)
        if config.doctor:
            consult(config, world)
        with open_run(config, world, strategy, life) as (run, folder, checkpoints):
            carry_out(run, life, folder, checkpoints)
    return life.exit_code


def lifecycle(config: Config | ConfigError, preemption: Preemption) -> Lifecycle:
    """Return the new attempt that `config` describes."""
    if isinstance(config, ConfigError):
        return Lifecycle(Path("."), preemption)
    return Lifecycle(Path(config.output_dir), preemption, max_idle_attempts=config.max_idle_attempts)


def join(config: Config | ConfigError, preemption: Preemption) -> tuple[World, Strategy]:
    """Build the strategy and form the process group. Collective: every rank must call it.

    Raises ConfigError on all ranks if one rank's config is wrong.
    """
    place = find_place(config)
    try:
        if isinstance(config, ConfigError):
            raise config
        strategy: Strategy = build(config.strategy)
        check_slices(config, strategy, place.world_size)
        strategy.check(config, place.world_size)
        check_honoured(config, strategy)
    except ConfigError as error:
        timeout_s = Dist().start_timeout_s if isinstance(config, ConfigError) else config.dist.start_timeout_s
        meet(place, alike=None, error=error, timeout_s=timeout_s, stopping=lambda: preemption.signalled)
        raise
    return start(group_options(config), place, stopping=lambda: preemption.signalled), strategy


def find_place(config: Config | ConfigError) -> Place:
    """Read rank and world size from the environment. Raises ConfigError; an invalid config is reported first."""
    if isinstance(config, Config):
        return Place.from_env(config.dist.init_method)
    try:
        return Place.from_env(str(given("dist.init_method", Dist().init_method)))
    except ConfigError:
        raise config from None


def consult(config: Config, world: World) -> None:
    """Run the doctor's quick checks. Collective: every rank must call it. Raises ConfigError if a check fails."""
    from train.doctor.show import wrong
    from train.doctor.visit import examine

    failed, warned = wrong(examine(world, visit_of(config, quick=True)))
    for line in warned:
        say(f"muster: doctor: {line}")
    world.together(ConfigError(f"the doctor: {'; '.join(failed)}") if failed else None)


@contextlib.contextmanager
def open_run(
    config: Config, world: World, strategy: Strategy, life: Lifecycle
) -> Iterator[tuple[Run, RunFolder, Checkpoints]]:
    """Build all parts of a run and restore the newest checkpoint. Collective: every rank must call it.

    Raises MusterError.
    """
    set_numerics(config)
    if not config.compile:
        stay_eager()
    data = load_data(config, world)
    refuse_unevaluated(config, data)
    batch_size, drop_last = min(config.batch_size, len(data.train)), config.loader.drop_last
    plan = Plan(len(data.train), batch_size, config.seed, shuffle=data.shuffles, drop_last=drop_last)
    total_steps = config.max_steps or config.epochs * plan.steps_per_epoch
    options = run_options(config)
    refusal = partial(refuse_changes, config, fingerprint=data.fingerprint, total_steps=total_steps)
    folder = life.claim(options, refusal=refusal)
    callbacks = Callbacks.of(config, data)
    measures = build_measures(config.metrics, world=world, sliced=config.virtual_world_size is not None)
    kinds = sorted({*world.gather(kind_of(world))}) if config.virtual_world_size else []
    weights = first_weights(config, world) if folder.saved is None else None
    parts = recipe(
        config, data, plan, total_steps, world, measures=measures, weights=weights, ignore=config.init_ignore
    )
    strategy.build(parts, world)
    life.on_end(strategy.close)
    callbacks.on_build(strategy)
    window = Window(world, slices=config.virtual_world_size, measures=config.log.train_metrics)
    progress = restore(config, world, folder, strategy, callbacks, window)
    total_steps = max(total_steps, progress.step)  # an earlier attempt may have had a larger `max_steps`
    life.restored(progress, report=partial(report, folder.path) if world.is_first and config.log.report else None)
    finished = folder.is_done and (progress.step >= total_steps or progress.stopped is not None)
    loggers = (
        open_loggers(
            config,
            step=progress.step,
            total_steps=total_steps,
            evaluated=None if finished or not progress.step else progress.evaluated,
        )
        if world.is_first
        else []
    )
    windows = record_times(config, world, step=progress.step)
    metrics = Metrics(loggers, samples=plan.samples_before(progress.step), windows=windows)
    checkpoints = Checkpoints(
        options.checkpoints,
        folder=folder.path,
        world=world,
        keep=config.checkpoint.keep,
        facts=identity(config, data, total_steps, kinds) | {"averages": callbacks.averages},
        newest_step=folder.saved.step if folder.saved else None,
        may_commit=folder.may_commit,
        on_commit=lambda facts: metrics.event("checkpoint_failed" if "failed" in facts else "checkpoint", **facts),
    )
    run = Run(
        config=config,
        peers=life.run(),
        course=Course(data=data, plan=plan, total_steps=total_steps, progress=progress),
        strategy=strategy,
        callbacks=callbacks,
        checkpoints=checkpoints,
        meters=Meters(records=metrics, measures=measures, clock=Clock(strategy.waited_s), window=window),
    )
    try:
        announce(run, folder, kinds)
        gc.freeze()  # imported modules live to the end: the collector need not scan them again
        gc.enable()
        yield run, folder, checkpoints
    finally:
        callbacks.close()
        metrics.close(run.step, run.meters.clock.rest())


def refuse_unevaluated(config: Config, data: Data) -> None:
    """Raise ConfigError if `checkpoint.best` or a callback needs evaluations and the run makes none."""
    needs = [f"checkpoint.best={config.checkpoint.best}"] if config.checkpoint.best else []
    needs += [part.key for part in config.callbacks.values() if getattr(locate(part), "needs_evaluations", False)]
    if needs and (why := never_evaluated(config, data)):
        raise ConfigError(f"{needs[0]} needs evaluations, and nothing is evaluated: {why}; or leave {needs[0]} out")


def never_evaluated(config: Config, data: Data) -> str | None:
    """Return why the run makes no evaluation, and how to enable it; None if it evaluates."""
    if config.eval.every_steps == "off":
        return "eval.every_steps=off says so: leave it out"
    if data.test is None:
        return (
            f"data._target_={config.data.target} has no parameter train{defined(data.train)}: give its constructor one, "
            "which gets True for the training split and False for the test split"
        )
    return None


def record_times(config: Config, world: World, *, step: int) -> Timing | None:
    """Return the writer of timing.jsonl on rank 0, None elsewhere. Collective: every rank must call it."""
    hosts = world.gather(socket.gethostname())
    return Timing(Path(config.output_dir), hosts=hosts, attempt=world.attempt, step=step) if world.is_first else None


def carry_out(run: Run, life: Lifecycle, folder: RunFolder, checkpoints: Checkpoints) -> None:
    """Train to the end, unless the run has already finished. Collective: every rank must call it.

    Raises MusterError, as `train.loop.train` does.
    """
    if folder.is_done and run.is_over:
        run.meters.records.event("done", step=run.step, note="finished already")
        life.end(Ending(run.step, run.total_steps), report=False)
        return
    try:
        ending = train(run)
    except Diverged:  # raised on every rank at the same step, so all ranks' checkpoint writers are still alive
        checkpoints.settle(SETTLE_S)
        raise
    except MusterError as error:
        if error.of_data and (where := origin_of_samples(run)):
            raise type(error)(f"{error}; samples come from {where}") from error
        raise
    if not ending.preempted:
        finish(run, folder, checkpoints)
    life.end(ending)


def origin_of_samples(run: Run) -> str:
    """Return where user code makes, collates and splits samples (file and line); empty if no user code does."""
    loader = run.config.loader
    own = {name: callable_of(f"loader.{name}", getattr(loader, name)) for name in ("collate_fn", "batch")}
    through = [f"loader.{name}{where}" for name, each in own.items() if (where := defined(each, "__call__"))]
    made = defined(run.course.data.train, "__getitem__", "__iter__").strip(" ()")
    if not through:
        return made
    return f"{made or run.config.data.target} through {' and '.join(through)}"


def finish(run: Run, folder: RunFolder, checkpoints: Checkpoints) -> None:
    """Write model.pt and best.json. Collective: every rank must call it.

    Raises StorageError.
    """
    run.peers.heartbeat.enter("finish", run.step)
    run.strategy.sync_parameters()
    run.callbacks.on_end(run)
    failure: MusterError | None
    failure = write_weights(folder.path / "model.pt", run.strategy.weights(), writes=run.world.is_first)
    if run.world.is_first and not failure:
        try:
            if run.progress.best:  # may be from the last evaluation, which comes after the last save
                checkpoints.note_best(run.progress.best)
            run.meters.records.event("done", step=run.step, output_dir=str(folder.path))
        except MusterError as error:
            failure = error
    run.world.together(failure)
    if run.config.log.report:
        run.meters.records.close(run.step, run.meters.clock.rest())  # before the report, which has the last window


def report(path: Path) -> None:
    """Write report.html. A failure is printed and never fails the run."""
    try:
        write_report(path)
    except Exception as error:
        say(f"muster: no report.html: {one_line(error)[:300]}; `python -m train.report {path}` makes it anew")


def restore(
    config: Config, world: World, folder: RunFolder, strategy: Strategy, callbacks: Callbacks, window: Window
) -> Progress:
    """Restore strategy, callbacks, loss sums and random number generators, and return the progress to continue from.

    Without a checkpoint, only seed the generators. Collective: every rank must call it.
    """
    saved = folder.saved
    seed_all(config.seed, world.rank, step=saved.step if saved else 0)
    if saved is None:
        return Progress()
    checkpoint.restore(saved, strategy, callbacks, window)
    manifest = saved.manifest
    return Progress(
        step=saved.step,
        evaluated=manifest.get("evaluated", saved.step),
        best=world.on_first(partial(known_best, config, folder.path, saved)),
        stopped=manifest.get("stopped") if ends_alike(config, manifest.get("config", {})) else None,
    )


def known_best(config: Config, folder: Path, saved: Saved) -> dict[str, Any] | None:
    """Return the best evaluation up to `saved`. best.json is read, too: only it has one after the last save."""
    metric, best = config.checkpoint.best, saved.manifest.get("best")
    if not metric:
        return None
    if best and best["metric"] != metric:
        say(
            f"muster: checkpoint.best={metric} was {best['metric']}: the best is looked for anew from step {saved.step}"
        )
        best = None
    noted = read_best(folder)
    if noted and noted.metric == metric and noted.step <= saved.step:
        if not best or is_better(metric, noted.value, best["value"]):
            best = {"metric": metric, "value": noted.value, "step": noted.step}
    return best


def ends_alike(config: Config, before: dict[str, Any]) -> bool:
    """Return True if callbacks, epochs and max_steps are as in config `before`: a stopped run then stays stopped."""
    now = to_dict(config)
    return all(now[key] == before.get(key) for key in ("callbacks", "epochs", "max_steps"))


def set_numerics(config: Config) -> None:
    """Set seeds, determinism and thread count. Must be called before the first tensor is created."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.virtual_world_size and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torchrun's default; the rounding of a sum depends on the number of threads
    _seed(config.seed)


def kind_of(world: World) -> str:
    """Return GPU or processor model and torch version: besides the order, the last bits of a sum depend on them."""
    here = environment()
    return f"{here['gpu' if world.device.type == 'cuda' else 'processor']}, torch {here['torch']}"


def seed_all(seed: int, rank: int, *, step: int) -> None:
    """Seed this rank's generators, for dropout and the like, from seed, rank and step.

    The step matters on resume at another world size, where the checkpoint's generator states do not fit: without it,
    dropout masks would repeat those of the first steps.
    """
    words = f"{seed}/{rank}/{step}" if step else f"{seed}/{rank}"
    _seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:7]))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def identity(config: Config, data: Data, total_steps: int, kinds: list[str]) -> dict[str, Any]:
    """Return the facts that identify this run, for the manifest of its checkpoints."""
    plain = to_dict(config)
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    threads = torch.get_num_threads() if config.virtual_world_size else None
    facts = {"fingerprint": data.fingerprint, "total_steps": total_steps, "threads": threads, "computes_on": kinds}
    return {**facts, "config_hash": digest, "config": plain}


def first_weights(config: Config, world: World) -> dict[str, Any] | None:
    """What `init_from` names; one rank of a host downloads while the others wait. Collective."""
    if not config.init_from:
        return None
    failure, weights, source = None, dict[str, Any](), config.init_from
    with world.local_first(torch.hub.get_dir()) as goes_first:
        try:
            source = str(local_copy(source, ask=goes_first)) if "://" in source else source
            weights = read_weights(source)
        except MusterError as error:
            failure = error
    world.together(failure)
    if source != config.init_from and len({*world.gather(Path(source).name)}) > 1:  # the file name is its digest
        raise StorageError(f"init_from={config.init_from} changed while the nodes downloaded it: run again")
    return weights


def recipe(
    config: Config,
    data: Data,
    plan: Plan,
    total_steps: int,
    world: World,
    *,
    measures: Measures | None = None,
    weights: Mapping[str, Any] | None = None,
    ignore: Sequence[str] | None = None,
) -> Recipe:
    """How to build the parts, for the strategy to do in its own order. Collective.

    weights, ignore: what the model begins with, but for such names; None: but for none.
    """
    wanted = signature(locate(config.model))
    offered: dict[str, Any] = {"num_classes": data.num_classes} if data.num_classes else {}
    if "input_shape" in wanted:  # reading `data.input_shape` may load a sample
        offered["input_shape"] = data.input_shape
    schedule = build_schedule(
        config.scheduler,
        lr=config.optimizer.values.get("lr"),
        total_steps=total_steps,
        steps_per_epoch=plan.steps_per_epoch,
    )

    objective = build_objective(config.objective, device=world.device)
    if isinstance(objective, nn.Module):
        begin_alike(objective)

    def new_optimizer(named: Iterable[Named], **options: Any) -> torch.optim.Optimizer:
        based = partial(adapt, schedule, total_steps=total_steps)
        return build_optimizer(config.optimizer, named, precision=config.precision, adapt=based, **options)

    return Recipe(
        build_model=partial(
            prepared,
            partial(build, config.model, **offered),
            weights=weights,
            ignore=ignore,
            freeze=config.freeze,
        ),
        build_optimizer=new_optimizer,
        objective=objective,
        schedule=schedule,
        precision=config.precision,
        grad_clip=config.grad_clip,
        compile=config.compile,
        channels_last=config.channels_last,
        on_nonfinite=config.on_nonfinite,
        seed=config.seed,
        slices=config.virtual_world_size,
        measures=measures or Measures({}),
        train_metrics=config.log.train_metrics,
        optimizer_options=frozenset(grouped_options(config.optimizer)),
    )


def announce(run: Run, folder: RunFolder, kinds: list[str]) -> None:
    """Write to metrics.jsonl how this attempt begins, and print the limits of what it guarantees.

    kinds: processor kinds of the ranks (see `kind_of`); empty without `virtual_world_size`.
    """
    before, world = folder.before, run.world
    if run.strategy.caveat and world.is_first:
        say(f"muster: {run.strategy.caveat}")
    facts = {
        "step": run.step,
        "total_steps": run.total_steps,
        "world_size": world.size,
        "device": str(world.device.type),
        "attempt": world.attempt,
    }
    if run.course.plan.batch_size < run.config.batch_size:
        asked, there = run.config.batch_size, run.course.plan.size
        run.meters.records.event(
            "note", text=f"batch_size={asked} is more than the {there} training samples: a step takes all of them"
        )
    given = run.config.max_steps or run.config.epochs * run.course.plan.steps_per_epoch
    if given < run.step:
        run.meters.records.event(
            "note", text=f"{given} steps are asked for and {run.step} are done: none is left to make"
        )
    meant = asked_for(world.place.local_world_size)
    if meant and world.size < meant:
        run.meters.records.event(
            "note", text=f"trains with {world.size} of the {meant} ranks that were asked for: others have not come"
        )
    if run.course.data.test is None and (why := never_evaluated(run.config, run.course.data)):
        run.meters.records.event("note", text=f"nothing is evaluated: {why}")
    for text in mixed_kinds(kinds, folder.saved.manifest.get("computes_on") if folder.saved else None):
        run.meters.records.event("note", text=text)
    if before.outcome not in ("none", attempts.DONE, attempts.PREEMPTED):
        run.meters.records.event("restart", step=run.step, after=before.outcome, cause=before.error)
    if folder.saved is None:
        run.meters.records.event(
            "start", output_dir=str(folder.path), samples_per_epoch=len(run.course.data.train), **facts
        )
        return
    run.meters.records.event("resume", checkpoint=folder.saved.path, **facts)
    then, now = folder.saved.manifest.get("config", {}).get("micro_batch_size"), run.config.micro_batch_size
    if then != now and world.is_first:
        say(f"muster: micro_batch_size={now} was {then}: batch norm and dropout see other batches from here on")


def mixed_kinds(kinds: list[str], then: list[str] | None) -> Iterator[str]:
    """Yield why virtual_world_size may not give one hash: ranks, or attempts (`then`: earlier), round differently."""
    asked = "virtual_world_size gives one hash of the weights for one kind of processor and one torch"
    if len(kinds) > 1:
        yield f"{asked}, and the ranks compute on {'; '.join(kinds)}: another division of them gives another hash"
    elif kinds and then and kinds != then:
        yield f"{asked}; up to this checkpoint it was {'; '.join(then)}, now it is {kinds[0]}: the hash will be another"
