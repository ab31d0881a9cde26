"""One attempt at a run, put together in the order in which data flows: world, data, model, strategy, checkpoint, loop."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from train.checkpoint import manager as checkpoint
from train.checkpoint import storage
from train.checkpoint.manager import Checkpoints
from train.checkpoint.storage import Saved, Storage
from train.checkpoint.weights import write_weights
from train.config.differences import differences, to_dict
from train.config.keys import Config
from train.config.parts import build
from train.data.load import Data
from train.data.load import load as load_data
from train.dist import place
from train.dist.world import World
from train.errors import (
    ConfigError,
    CrashLoop,
    DataError,
    Diverged,
    MusterError,
    NoValidCheckpoint,
    StorageError,
    say,
    storage_error,
)
from train.faults import attempts as outcome
from train.faults import lease
from train.faults.heartbeat import Heartbeat
from train.faults.preemption import Preemption
from train.files import replace_file
from train.loggers.jsonl import last_step
from train.loggers.metrics import Metrics, open_loggers
from train.loop import Run, train
from train.optim.build import build_optimizer
from train.plan import Plan
from train.strategies.base import Recipe, Strategy

SETTLE_S = 10.0
SEE_AGAIN_S = 0.1
OF_A_RUN = ("checkpoints", "metrics.jsonl", "config.yaml", "outcome.json", "model.pt", "tensorboard", "report.html")


def prepare(config: Config, world: World, preemption: Preemption, heartbeat: Heartbeat) -> Run:
    """Open `config.output_dir` and build everything, from where the newest checkpoint left it. Collective.

    Raises:
        MusterError: the run cannot go on; see errors.py.
    """
    folder = Path(config.output_dir)
    set_numerics(config, world)
    saved, before, held = open_folder(folder, config, world)
    try:
        return build_run(config, world, preemption, heartbeat, saved=saved, before=before, held=held)
    except BaseException:
        if held:
            held.let_go()
        raise


def build_run(
    config: Config,
    world: World,
    preemption: Preemption,
    heartbeat: Heartbeat,
    *,
    saved: Saved | None,
    before: dict[str, Any],
    held: lease.Lease | None,
) -> Run:
    """Everything that a run is made of, in the state of `saved`. Collective."""
    folder = Path(config.output_dir)
    data = load_data(config, world)
    plan = Plan(
        len(data.train), min(config.batch_size, len(data.train)), config.seed, drop_last=config.loader.drop_last
    )
    total_steps = config.max_steps or config.epochs * plan.steps_per_epoch
    world.together(refuse_changes(config, data, saved) if saved else None)
    if world.is_first:  # not before: a config that was refused is not the run's
        write_config(folder, config)

    strategy: Strategy = build(config.strategy, world=world)
    strategy.build(recipe(config, data, plan, total_steps))
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{config.seed}/{world.rank}".encode()).digest()[:7]))
    if saved:
        checkpoint.restore(saved, strategy)

    step = saved.step if saved else 0
    loggers = open_loggers(config, step=step, total_steps=total_steps) if world.is_first else []
    metrics = Metrics(loggers, samples=plan.samples_before(step))
    checkpoints = Checkpoints(
        storage_of(config),
        folder=folder,
        world=world,
        keep=config.checkpoint.keep,
        on_commit=lambda facts: metrics.event("checkpoint_failed" if "failed" in facts else "checkpoint", **facts),
    )
    checkpoints.newest_step = saved.step if saved else None
    identity = {"fingerprint": data.fingerprint, "config_hash": config_hash(config), "config": to_dict(config)}
    run = Run(
        config,
        world,
        data,
        plan,
        strategy,
        checkpoints,
        metrics,
        preemption,
        heartbeat,
        held,
        identity,
        total_steps,
        step,
        finished_before=before["done"],
    )
    announce(run, saved, before)
    return run


def carry_out(run: Run) -> None:
    """Train to the end, unless that was done before. Collective. Raises MusterError as `train.loop.train` does."""
    folder = Path(run.config.output_dir)
    run.preemption.watch(run.world)
    try:
        if run.step >= run.total_steps and run.finished_before:
            run.metrics.event("done", step=run.step, note="finished already")
            end(run, folder)
        else:
            train(run)
            finish(run, folder)
    except Diverged:  # on every rank alike, so the writers of all of them are still there
        run.checkpoints.settle(SETTLE_S)
        raise
    finally:
        run.preemption.close()
        run.metrics.close()
        if run.held:
            run.held.let_go()


def set_numerics(config: Config, world: World) -> None:
    """Seeds and switches that have to be set before the first tensor."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.manual_seed(config.seed)


def open_folder(folder: Path, config: Config, world: World) -> tuple[Saved | None, dict[str, Any], lease.Lease | None]:
    """Make the run's folder, choose the checkpoint to resume from; also how the attempt before ended. Collective.

    Rank 0 looks and chooses for all: two ranks that look for themselves may see different files.
    """
    failure: MusterError | None = None
    before: dict[str, Any] = {}
    held: lease.Lease | None = None
    if world.is_first:
        try:
            before = outcome.read(folder)
            same_launch = place.same_launch(before, world.agents)
            if not same_launch:
                lease.refuse_if_held(folder, before)
            if config.checkpoint.resume == "never" and not same_launch:
                set_aside(folder, config)
                before = {}
            make_folder(folder)
            take_over(folder, world, before)
            held = lease.Lease(folder, world.attempt)
        except MusterError as error:
            failure = error
    try:
        world.together(failure)
        see_folder(folder, world)
        before = world.broadcast(before)
        saved, bad = find_checkpoint(config, world, before)
        done = world.on_first(lambda: note_start(folder, config, world, before, saved))
    except BaseException:
        if held:
            held.let_go()
        raise
    for line in bad if world.is_first else []:
        say(f"muster: quarantined a bad checkpoint: {line}")
    return saved, {**before, "bad": bad, "done": done}, held


def see_folder(folder: Path, world: World) -> None:
    """Raises StorageError if a rank does not see what rank 0 has just written: the folder is not shared. Collective."""
    deadline = time.monotonic() + storage.SEEN_WITHIN_S
    while not (seen := outcome.read(folder).get("attempt") == world.attempt) and time.monotonic() < deadline:
        time.sleep(SEE_AGAIN_S)
    world.together(
        None
        if seen
        else StorageError(
            f"output_dir={folder} on {socket.gethostname()} is not the folder that rank 0 writes to: "
            "give one that all nodes share"
        )
    )


def note_start(folder: Path, config: Config, world: World, before: dict[str, Any], saved: Saved | None) -> bool:
    """Put on record from where this attempt starts; whether the run was done before. Raises CrashLoop."""
    facts = count_idle_attempts(folder, config, before, saved)
    outcome.write(folder, outcome.RUNNING, exit_code=None, attempt=world.attempt, agents=world.agents, **facts)
    return before.get("outcome") == "done" and (folder / "model.pt").exists()


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("use output_dir:", error) from error


def take_over(folder: Path, world: World, before: dict[str, Any]) -> None:
    """From here on the run is this attempt's: what is wrong with it now is this attempt's outcome."""
    kept = {key: before[key] for key in ("step", "furthest", "idle_attempts", "cause") if key in before}
    outcome.write(folder, outcome.RUNNING, exit_code=None, attempt=world.attempt, agents=world.agents, **kept)


def count_idle_attempts(folder: Path, config: Config, before: dict[str, Any], saved: Saved | None) -> dict[str, Any]:
    """What outcome.json keeps of earlier attempts. Raises CrashLoop if too many in a row came no further."""
    furthest = max(saved.step if saved else 0, last_step(folder), before.get("step") or 0)
    idle = outcome.idle_attempts(before, furthest)
    cause = before.get("error") or before.get("cause")
    if idle > config.max_idle_attempts:
        raise CrashLoop(
            f"{idle} attempts in a row came no further than step {furthest}, the last one {before['outcome']}: "
            f"{cause or 'killed'}. Mend the cause and run the same command again"
        )
    return {"step": furthest, "furthest": furthest, "idle_attempts": idle, "cause": cause}


def find_checkpoint(config: Config, world: World, before: dict[str, Any]) -> tuple[Saved | None, list[str]]:
    """The run's own newest checkpoint, else the one that `checkpoint.resume` names; and what was wrong with others.

    Collective.

    Raises:
        NoValidCheckpoint: there are or were some, as the outcome of the attempt `before` has it, and none is valid.
    """
    bad: list[str] = []
    place = storage_of(config)
    world.on_first(place.prepare)
    own = checkpoint.newest(place, world, on_bad=bad.append)
    if own is None and (noted := before.get("checkpoint")):
        raise NoValidCheckpoint(
            f"step {noted['step']} was saved as {noted['path']}, and there is no checkpoint in {place.root}: "
            "restore it, give the checkpoint.storage of before, or start over with checkpoint.resume=never"
        )
    named = config.checkpoint.resume.rstrip("/")
    if own or named in ("auto", "never"):
        return own, bad
    return named_checkpoint(named, world, bad), bad


def named_checkpoint(named: str, world: World, bad: list[str]) -> Saved:
    """The checkpoint of another run that `checkpoint.resume` names. Collective."""
    root, _, last = named.rpartition("/")
    inside = Path(named, "checkpoints")
    found, nested = world.on_first(lambda: [Path(named).is_dir(), inside.is_dir()])
    if "://" not in named and not found:
        raise ConfigError(
            f"checkpoint.resume={named} is no folder: give auto, never, a run's folder, one checkpoint's, or a URL"
        )
    if match := storage.STEP.fullmatch(last):
        return checkpoint.verify(Storage(root or "."), int(match[1]), world)
    other = checkpoint.newest(Storage(str(inside) if nested else named), world, on_bad=bad.append, own=False)
    if other is None:
        raise NoValidCheckpoint(
            f"checkpoint.resume={named} holds no checkpoint: give a run's folder or one checkpoint's"
        )
    return other


def storage_of(config: Config) -> Storage:
    """Where the run's checkpoints go: `checkpoint.storage`, else `checkpoints/` in its folder."""
    return Storage(config.checkpoint.storage or str(Path(config.output_dir, "checkpoints")))


def set_aside(folder: Path, config: Config) -> None:
    """Move an earlier run in this folder to `previous-N`: starting over loses nothing."""
    there = [folder / name for name in OF_A_RUN if (folder / name).exists()]
    if there:
        number = 1 + max(
            (int(path.name[9:]) for path in folder.glob("previous-*") if path.name[9:].isdigit()), default=0
        )
        aside = folder / f"previous-{number}"
        try:
            aside.mkdir()
            for path in there:
                path.rename(aside / path.name)
        except OSError as error:
            raise storage_error("set the earlier run aside:", error) from error
    if config.checkpoint.storage:
        storage_of(config).start_over()


def write_config(folder: Path, config: Config) -> None:
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
    replace_file(folder / "config.yaml", lambda draft: draft.write_text(text))


def config_hash(config: Config) -> str:
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:16]


def refuse_changes(config: Config, data: Data, saved: Saved) -> MusterError | None:
    """What forbids to go on from `saved` with this config and this data, if anything does."""
    if config.checkpoint.accept_changes:
        return None
    changed = differences(saved.manifest["config"], config)
    if changed:
        return ConfigError(
            f"{config.output_dir} holds another run: {'; '.join(changed[:5])}{'; ...' if len(changed) > 5 else ''}. "
            "Give another name or output_dir, go on all the same with checkpoint.accept_changes=true, or start over with checkpoint.resume=never"
        )
    if saved.manifest["fingerprint"] != data.fingerprint:
        return DataError(
            f"the training data has changed since {saved.path} was written (fingerprint {saved.manifest['fingerprint']}, "
            f"now {data.fingerprint}): restore it, or go on all the same with checkpoint.accept_changes=true"
        )
    return None


def recipe(config: Config, data: Data, plan: Plan, total_steps: int) -> Recipe:
    """How to build the parts, for the strategy to do in its own order."""
    offered = {"input_shape": data.input_shape, **({"num_classes": data.num_classes} if data.num_classes else {})}
    return Recipe(
        build_model=partial(build, config.model, **offered),
        build_optimizer=partial(build_optimizer, config.optimizer, precision=config.precision),
        objective=build(config.objective),
        schedule=build(config.scheduler, total_steps=total_steps, steps_per_epoch=plan.steps_per_epoch),
        precision=config.precision,
        grad_clip=config.grad_clip,
        compile=config.compile,
        channels_last=config.channels_last,
        on_nonfinite=config.on_nonfinite,
        optimizer_options=frozenset(config.optimizer.values),
    )


def announce(run: Run, saved: Saved | None, before: dict[str, Any]) -> None:
    """Say in metrics.jsonl how this attempt begins."""
    facts = {
        "step": run.step,
        "total_steps": run.total_steps,
        "world_size": run.world.size,
        "device": str(run.world.device.type),
        "attempt": run.world.attempt,
    }
    if before.get("outcome") and before["outcome"] not in outcome.FINISHED:
        run.metrics.event("restart", step=run.step, after=before["outcome"], cause=before.get("error"))
    if saved:
        run.metrics.event("resume", checkpoint=saved.path, **facts)
    else:
        run.metrics.event(
            "start", output_dir=str(run.config.output_dir), samples_per_epoch=len(run.data.train), **facts
        )


def end(run: Run, folder: Path) -> None:
    """Put on record that the run is done. Raises StorageError."""
    if run.world.is_first:
        outcome.write(
            folder, "done", exit_code=0, attempt=run.world.attempt, step=run.step, total_steps=run.total_steps
        )


def finish(run: Run, folder: Path) -> None:
    """Write what a finished run leaves behind. Collective."""
    run.heartbeat.enter("finish", run.step)
    run.strategy.sync_parameters()
    failure = write_weights(folder / "model.pt", run.strategy.weights(), writes=run.world.is_first)
    if run.world.is_first and not failure:
        try:
            if run.config.log.report:
                from train.report.page import write_report

                write_report(folder)
            run.metrics.event("done", step=run.step, output_dir=str(folder))
            end(run, folder)
        except MusterError as error:
            failure = error
    run.world.together(failure)
