"""The training loop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from train.config.keys import Config, NonFinite, Precision
from train.data.generators import kept_generators, key_of, seed_generators
from train.data.load import Data
from train.data.loader import Batch, LoaderConfig, batches
from train.dist.world import World
from train.errors import Diverged, Preempted
from train.faults.heartbeat import Heartbeat
from train.faults.preemption import Preemption
from train.objectives.measure import Measures, is_better, means, value_of
from train.plan import Plan
from train.strategies.base import StepResult, Strategy
from train.timing.clock import Clock, Times, gathered, spread
from train.window import Window

EVAL_BATCH = 256


class Saves(Protocol):
    """Interface of checkpoints to the loop (checkpoint/manager.py)."""

    def save(self, *, state: dict[str, Any], position: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...


class Records(Protocol):
    """Interface of metrics to the loop (loggers/metrics.py)."""

    def begin(self) -> None: ...
    def train(
        self, *, step: int, epoch: int, loss: float, lr: float, grad_norm: float, samples: int, more: dict[str, float]
    ) -> None: ...
    def eval(self, *, step: int, epoch: int, seconds: float, values: dict[str, float]) -> None: ...
    def event(self, event: str, **details: Any) -> None: ...
    def timing(self, step: int, ranks: list[Times]) -> None: ...
    def advance(self, step: int) -> None: ...
    def close(self, step: int, rest: Times) -> None: ...


class Hooks(Protocol):
    """Interface of callbacks to the loop (callbacks/base.py)."""

    def on_start(self, run: Run) -> None: ...
    def on_step_end(self, run: Run) -> None: ...
    def on_trial(self, values: dict[str, float]) -> None: ...
    def on_eval_begin(self, run: Run) -> None: ...
    def on_eval_end(self, run: Run, values: dict[str, float]) -> None: ...
    def on_checkpoint(self, run: Run) -> None: ...
    def on_end(self, run: Run) -> None: ...
    def state(self) -> dict[str, Any]: ...


@dataclass
class Progress:
    """Progress of a run over all its attempts.

    step: optimizer steps done. evaluated: step of the last complete evaluation.
    skipped_in_a_row: steps skipped since the last one that was not.
    best: {metric, value, step} of the evaluation with the best `checkpoint.best`. stopped: why training ends early.
    """

    step: int = 0
    evaluated: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, Any] | None = None
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt at a run: its parts and its progress."""

    config: Config
    world: World
    data: Data
    plan: Plan
    strategy: Strategy
    checkpoints: Saves
    metrics: Records
    preemption: Preemption
    heartbeat: Heartbeat
    total_steps: int
    progress: Progress
    callbacks: Hooks
    measures: Measures
    clock: Clock
    window: Window

    @property
    def step(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self.progress.step

    @property
    def is_over(self) -> bool:
        """True if all steps are done or training was stopped early."""
        return self.step >= self.total_steps or self.progress.stopped is not None

    def stop(self, reason: str) -> None:
        """End training after this step, as if it were the last. Every rank must call it at the same step."""
        if not self.is_over:
            self.progress.stopped = reason
            self.metrics.event("stopped", step=self.step, reason=reason)


def train(run: Run) -> None:
    """Train from `run.step` to the end. Collective: every rank must call it.

        try an evaluation, repeat one that a stop cut short
        while steps are left:
            begin the next step, or stop here if the ranks agreed to
            one optimizer step on the next micro-batches
            log, evaluate, save, each at its interval
        save and evaluate

    Raises:
        Preempted: the run was preempted; a checkpoint of the current step is written.
        Diverged: the loss, gradient or weights are not finite, and `on_nonfinite` or `max_skipped_steps` says to stop.
        StorageError: checkpoints cannot be written.
    """
    try_evaluation(run)
    run.callbacks.on_start(run)
    run.clock.begin()
    run.metrics.begin()
    evaluate_if_due(run)
    for micro_batches in run.clock.waiting(load(run, run.plan, range(run.step, run.total_steps))):
        if run.is_over:
            break
        begin(run, "step")
        result = run.strategy.step(run.step, micro_batches)
        run.window.add(result, samples=run.plan.count(run.step))
        run.progress.step += 1
        count_skips(run, result)
        run.metrics.advance(run.step)
        run.callbacks.on_step_end(run)
        if run.step % run.config.log.every_steps == 0 or run.is_over:
            log(run, result)
        evaluate_if_due(run)
        if is_time_to_save(run):
            save(run)
    save(run)
    evaluate(run)
    flush(run)


def load(run: Run, plan: Plan, steps: range, *, train: bool = True) -> Iterator[list[Batch]]:
    """This rank's micro-batches of each of `steps`, of the training or the test split; empty ones on a rank that takes no
    samples."""
    if run.strategy.data_shard is None:
        return iter([] for _ in steps)
    loader = LoaderConfig.of(run.config, shard=run.strategy.data_shard, device=run.world.device, train=train)
    return batches(run.data.train if train else run.data.test, plan, steps, loader)


def evaluate_if_due(run: Run) -> None:
    """Evaluate at the interval, between two steps, unless this step was evaluated already.

    On resume this repeats an evaluation during which an earlier attempt was stopped.
    """
    every = run.config.eval.every_steps or run.plan.steps_per_epoch
    if isinstance(every, int) and 0 < run.step < run.total_steps and run.step % every == 0:
        if run.progress.evaluated != run.step:
            evaluate(run)


def evaluate(run: Run) -> None:
    """Evaluate the test split, every sample exactly once at any world size. Collective: every rank must call it."""
    if run.data.test is None or run.config.eval.every_steps == "off" or run.progress.evaluated == run.step > 0:
        return
    started = time.perf_counter()
    with run.clock.spending("evaluation"):
        run.callbacks.on_eval_begin(run)
        values = measure(run, begin)
    run.metrics.eval(step=run.step, epoch=epoch(run), seconds=time.perf_counter() - started, values=values)
    run.progress.evaluated = run.step
    run.callbacks.on_eval_end(run, values)
    note_best(run, values)


def try_evaluation(run: Run) -> None:
    """Evaluate `eval.sanity_batches` before the first step: a broken evaluation ends the run now, not an epoch later.

    Has no side effects: generators, metrics and buffers are unchanged, only the callback hook `on_trial` is called,
    and nothing is compiled. A resumed run skips it. Collective: every rank must call it.
    """
    most = run.config.eval.sanity_batches
    if not most or run.step or run.data.test is None or run.config.eval.every_steps == "off":
        return
    eager = torch.compiler.set_stance("force_eager") if run.config.compile else contextlib.nullcontext()
    with kept_generators(on_device=True), run.measures.aside(), eager:
        values = measure(run, lambda run, phase: run.heartbeat.enter(phase, run.step), most=most)
    if run.config.checkpoint.best:
        value_of(run.config.checkpoint.best, values, key="checkpoint.best")
    run.callbacks.on_trial(values)


def measure(run: Run, begin: Callable[[Run, str], None], *, most: int | None = None) -> dict[str, float]:
    """Return the means over the test split, or its first `most` batches. Collective: every rank must call it."""
    totals, slices, test = dict[str, Any](), run.config.virtual_world_size, run.data.test
    assert test is not None
    size = min(len(test), run.config.eval.max_samples or len(test))
    ranks = run.strategy.data_shard[1] if run.strategy.data_shard else 1
    batch_size = run.config.batch_size if most else EVAL_BATCH * (slices or ranks)  # a trial costs no more than a step
    plan = Plan(size, batch_size=min(size, batch_size), shuffle=False)
    steps = range(min(plan.steps_per_epoch, most or plan.steps_per_epoch))
    for number, micro_batches in enumerate(load(run, plan, steps, train=False)):
        begin(run, "evaluation")
        for batch in seeded(micro_batches, run.config.seed, number):
            for name, value in run.strategy.evaluate(batch).items():
                key = f"{batch.slice:08d}/{name}" if slices else f"/{name}"  # sum in slice order, not rank order
                totals[key] = totals.get(key, 0) + value.double()
    begin(run, "evaluation")
    values = means(
        run.world.sum_named({key: float(value) for key, value in totals.items()}), count=plan.samples_before(len(steps))
    )
    return values | run.measures.compute(run.world)


def seeded(micro_batches: list[Batch], *words: int) -> Iterator[Batch]:
    """Yield an evaluation's micro-batches, with generators seeded for each from `words` and its position.

    The generators of training are left unchanged.
    """
    with kept_generators(on_device=True):
        for number, parts in groupby(micro_batches, key=lambda batch: batch.slice):
            for part, batch in enumerate(parts):
                seed_generators(key_of(*words, "evaluation", number, part), on_device=True)
                yield batch


def note_best(run: Run, values: dict[str, float]) -> None:
    """Record this step in `progress.best` if its `checkpoint.best` metric is the best so far."""
    if not (metric := run.config.checkpoint.best):
        return
    value, best = value_of(metric, values, key="checkpoint.best"), run.progress.best
    if not best or is_better(metric, value, best["value"]):
        run.progress.best = {"metric": metric, "value": value, "step": run.step}


def is_time_to_save(run: Run) -> bool:
    """Return True if a checkpoint is due between two steps. After the last step `train` saves in any case."""
    is_best = run.progress.best is not None and run.progress.best["step"] == run.step
    return not run.is_over and (run.step % run.config.checkpoint.every_steps == 0 or is_best)


def log(run: Run, result: StepResult) -> None:
    """Report the steps since the last line. The only place in the loop that waits for the device.

    Collective: every rank must call it.
    """
    own_loss = run.window.own_loss()  # waits for the device
    is_due = run.clock.is_due(run.world.size)
    times = spread(run.clock.read(), rank=run.world.rank, size=run.world.size) if is_due else []
    losses, *everybody = run.world.sum([own_loss, *times])
    loss, more = run.window.close(losses)
    if not math.isfinite(loss) and run.config.on_nonfinite is NonFinite.stop:
        raise diverged(run)
    run.metrics.train(
        step=run.step,
        epoch=epoch(run),
        loss=loss,
        lr=run.strategy.lr,
        grad_norm=float(result.grad_norm),
        samples=run.plan.samples_before(run.step),
        more=more,
    )
    if is_due:
        run.metrics.timing(run.step, gathered(everybody))


def save(run: Run) -> None:
    """Start to write a checkpoint of this step. Collective: every rank must call it.

    Raises Diverged instead of saving weights that are not finite.
    """
    run.heartbeat.enter("save", run.step)
    run.callbacks.on_checkpoint(run)
    if not run.strategy.is_finite():
        raise diverged(run)
    position = {
        "step": run.step,
        "epoch": epoch(run),
        "samples": run.plan.samples_before(run.step),
        "evaluated": run.progress.evaluated,
        "best": run.progress.best,
        "stopped": run.progress.stopped,
    }
    with run.clock.spending("checkpoint"):
        state = {**run.strategy.state(), **run.callbacks.state(), **run.window.state()}
        run.checkpoints.save(state=state, position=position)
    run.heartbeat.enter("step", run.step)


def flush(run: Run) -> None:
    """Wait for the checkpoint that is being written. Raises StorageError if it failed."""
    run.heartbeat.enter("save", run.step)
    with run.clock.spending("checkpoint"):
        run.checkpoints.flush()


def begin(run: Run, phase: str) -> None:
    """Enter the next phase of work. If all ranks agreed to stop here, save and raise Preempted."""
    run.heartbeat.enter(phase, run.step)
    if run.preemption.proceed():
        return
    save(run)
    flush(run)
    run.metrics.event("preempted", step=run.step)
    raise Preempted(
        f"stopped at step {run.step} of {run.total_steps} and saved it: run the same command again to resume"
    )


def count_skips(run: Run, result: StepResult) -> None:
    """Count consecutive steps skipped for a non-finite gradient; raise Diverged above the limit.

    The count is the same on all ranks.
    """
    run.progress.skipped_in_a_row = run.progress.skipped_in_a_row + 1 if result.skipped else 0
    if not result.skipped:
        return
    scaled = run.config.precision is Precision.fp16  # its gradient scaler finds the scale by trial, skipping steps
    stop = run.config.on_nonfinite is NonFinite.stop and not scaled
    if stop or run.progress.skipped_in_a_row > run.config.max_skipped_steps:
        raise diverged(run)
    run.metrics.event("skipped", step=run.step, in_a_row=run.progress.skipped_in_a_row)


def diverged(run: Run) -> Diverged:
    """Return the error that says where training diverged and what to change."""
    times = f" ({run.progress.skipped_in_a_row} in a row)" if run.progress.skipped_in_a_row else ""
    return Diverged(
        f"loss, gradient or weights are not finite at step {run.step}{times}: lower optimizer.lr, "
        "set grad_clip, or leave such steps out with on_nonfinite=skip"
    )


def epoch(run: Run) -> int:
    """Return the epoch of the last step done, from 0."""
    return run.plan.epoch(max(0, run.step - 1))
