"""The training loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.attempt.attempt import Attempt
from muster.attempt.best import best_of, value_of
from muster.attempt.lifecycle import Ending
from muster.attempt.running_means import COUNTED, MEASURED, RunningMeans
from muster.checkpoint.trained import Trained
from muster.code_location import described
from muster.data.generators import kept_generators
from muster.data.loader import Batch
from muster.errors import ConfigError, Diverged
from muster.loggers.metrics import Metrics, check_names
from muster.sample_plan import Plan
from muster.train.config.keys import Config, NonFinite, Precision
from muster.train.data.batches import micro_batches
from muster.train.evaluation import best_mode, measure
from muster.train.objectives.measure import Measures, means_of_slices
from muster.train.progress import ENDED, EVALUATED, LOGGED, SAVED, Course, Progress
from muster.train.strategies.base import StepResult, Strategy
from muster.train.strategies.step.counts import Counts
from muster.train.strategies.step.optimizer_step import Stepping
from muster.train.throughput import OF_LINES, peak_memory
from muster.world.counts import OF
from muster.world.group import World

LOSS, LOSS_OF = "loss", f"loss{OF}"
"""Names of sums over the steps of a line: the loss, and what its mean is over."""


class Hooks(Protocol):
    """Interface of callbacks to the loop (callbacks/base.py)."""

    are_within: bool
    are_cut_short: bool

    def on_start(self, run: Run) -> None: ...
    def on_step_end(self, run: Run) -> None: ...
    def on_trial(self, values: dict[str, float]) -> None: ...
    def on_eval_begin(self, run: Run) -> None: ...
    def on_eval_end(self, run: Run, values: dict[str, float]) -> None: ...
    def on_checkpoint(self, run: Run) -> None: ...
    def on_end(self, run: Run) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt at a run: its parts and its progress.

    running: heartbeat, records with their means, intervals, checkpoints and the agreed stop. course: the data and the steps.
    trained: what checkpoints have. counts: weights of micro-batches. measures: metrics of evaluations.
    """

    config: Config
    running: Attempt
    course: Course
    trained: Trained
    strategy: Strategy
    counts: Counts
    callbacks: Hooks
    measures: Measures

    @property
    def world(self) -> World:
        return self.running.world

    @property
    def records(self) -> Metrics:
        return self.running.records

    @property
    def means(self) -> RunningMeans:
        """The sums since the last `train` line."""
        return self.running.means

    @property
    def progress(self) -> Progress:
        """The progress over all attempts."""
        return self.course.progress

    @property
    def model(self) -> nn.Module:
        """The model as the strategy holds it: of a sharded or divided one, this rank's part.

        Raises ConfigError: the strategy does not have it in one module.
        """
        model = getattr(self.strategy, "model", None)
        if model is None and isinstance(self.strategy, Stepping):
            model = self.strategy.optimizer_step.model
        if not isinstance(model, nn.Module):
            raise ConfigError(f"run.model: {type(self.strategy).__name__} has no module `model` on this rank")
        return model

    @property
    def total_steps(self) -> int:
        return self.course.total_steps

    @property
    def step(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self.progress.step

    @property
    def is_over(self) -> bool:
        return self.course.is_over

    @property
    def is_evaluated_again(self) -> bool:
        """True if an evaluation of this step is one that the restored state of callbacks has counted."""
        return self.progress.counted == self.step > 0

    @property
    def is_preempted(self) -> bool:
        """True once the ranks have stopped between two phases of work, as they agreed to."""
        return self.running.peers.agreement.is_reached

    def log(self, **values: float | Tensor) -> None:
        """Add values by name to the next `train` line; of a name that is logged again before it, the last value counts.

        The line has rank 0's values: reduce a value over all ranks before. Values that are logged after the last line, as in the last
        evaluation, make an event `logged`. Does not wait for the device.
        Raises ConfigError: a value is not a number, or records use its name themselves.
        """
        check_names(values, "run.log()", taken=OF_LINES)
        for name, value in values.items():
            is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
            if not is_number:
                raise ConfigError(
                    f"run.log({name}=...): {described(value)} is not a number: give a number or a tensor []"
                )
            self.means.logged[name] = value.detach() if isinstance(value, Tensor) else float(value)

    def stop(self, reason: str) -> None:
        """End training after this step, as if it were the last. Every rank must call it at the same step."""
        if not self.is_over:
            self.progress.stopped = reason
            self.records.event("stopped", step=self.step, reason=reason)


def train(run: Run) -> Ending:
    """Train from `run.step` to the end, and return how training ended. Collective.

        try an evaluation, repeat one that a stop cut short
        for each step that is left, until the ranks agree to stop:
            one optimizer step on the next micro-batches
            log, evaluate, save, each at its interval
        save and evaluate

    If the run is preempted, a checkpoint of the current step is written.
    Raises Diverged: the loss, gradient or weights are not finite, and `on_nonfinite` or `max_skipped_steps` says to stop.
    Raises StorageError: checkpoints cannot be written.
    """
    course, running = run.course, run.running
    try_evaluation(run)
    run.callbacks.on_start(run)
    running.start()
    end_step(run)
    for batches in steps(run):
        result = run.strategy.step(run.step, weigh(run, batches))
        samples, seen, measures = course.plan.count(run.step), run.counts.seen, run.config.log.train_metrics
        add_to(run.means, result, samples=samples, seen=seen, is_first=run.world.is_first, measures=measures)
        run.progress.advance(result)
        count_skips(run, result)
        running.records.advance(run.step)
        run.callbacks.on_step_end(run)
        run.progress.stage = ENDED
        end_step(run)
    if not run.is_preempted:
        save(run)
        evaluate(run)
    if run.is_preempted:  # perhaps during that evaluation
        save(run)
        return running.stopped()
    if late := run.means.take_logged():
        run.records.event("logged", step=run.step, **late)
    return running.done()


def add_to(
    means: RunningMeans,
    result: StepResult,
    *,
    samples: int,
    seen: tuple[Any, Any] | None,
    is_first: bool,
    measures: bool,
) -> None:
    """Add the result of a step of `samples` samples to the means of the next `train` line.

    `seen`: what makes a sum of this rank's share of the loss, and this rank's part of what the mean is over (`Counts.seen`); None:
    the samples. `measures`: whether steps return metrics.
    """
    if means.takes(samples=samples, is_skipped=result.skipped):
        times, of = seen or (samples, samples * is_first)
        means.add({LOSS: result.loss}, times=times)
        means.add({LOSS_OF: of, **{f"{MEASURED}{name}": value for name, value in result.metrics.items()}})
        if measures:
            means.add({f"{MEASURED}{COUNTED}": samples * is_first})


def own_loss(means: RunningMeans) -> list[float]:
    """Return this rank's part of the sum of losses, and of what their mean is over. Waits for the device."""
    sums = means.own()
    return [sums.get(name, 0.0) for name in (LOSS, LOSS_OF)]


def end_step(run: Run) -> None:
    """Log, evaluate and save, as far as each is due at this step and is not done. Collective.

    Before the first step of an attempt this repeats an evaluation that a stop cut short, and does what a rank that died has left.
    """
    progress = run.progress
    run.running.look()
    if progress.stage < LOGGED and is_time_to_log(run):
        assert progress.result
        log(run, progress.result)
        progress.logged = run.step
    progress.stage = max(progress.stage, LOGGED)
    evaluate_if_due(run)
    progress.stage = max(progress.stage, EVALUATED)
    is_saved = progress.stage >= SAVED and not is_best(run)  # which may be of another run's checkpoint
    if not is_saved and is_time_to_save(run):
        save(run)
    progress.stage = SAVED


def is_time_to_log(run: Run) -> bool:
    return run.is_over or run.running.is_due("line")


def steps(run: Run) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step that is left, until the run is over or the ranks have agreed to stop."""
    left = range(run.step, run.total_steps)
    for batches in run.running.clock.waiting([] if run.is_preempted else load(run, run.course.plan, left)):
        if run.is_over or not run.running.begin("step"):
            return
        yield batches
        if run.is_preempted:
            return


def weigh(run: Run, batches: list[Batch]) -> list[Batch]:
    """Return the micro-batches with their weights in the loss of the step. Collective."""
    return run.counts.weigh(batches, alone=run.strategy.is_alone(run.step))


def load(run: Run, plan: Plan, steps: range) -> Iterator[list[Batch]]:
    shard, device = run.strategy.data_shard, run.world.device
    return micro_batches(run.config, run.course.data.train, plan, steps, shard=shard, device=device)


def evaluate_if_due(run: Run) -> None:
    if is_time_to_evaluate(run):
        evaluate(run)


def is_time_to_evaluate(run: Run) -> bool:
    """Return True if an evaluation is due between two steps, and is not done."""
    return 0 < run.step < run.total_steps and run.running.is_due("evaluation") and run.progress.evaluated != run.step


def evaluate(run: Run) -> None:
    """Evaluate the test split, every sample exactly once at any world size. Collective."""
    if run.course.data.test is None or run.config.eval.every_steps == "off" or run.progress.evaluated == run.step > 0:
        return

    def measured() -> dict[str, float] | None:
        run.callbacks.on_eval_begin(run)
        return measure_test(run, begin=lambda: run.running.begin("evaluation"))

    values = run.running.evaluate(measured, epoch=epoch(run))
    if values is None:  # cut short: the next attempt repeats it
        return
    if not math.isfinite(values.get("loss", 0.0)):
        stop_if_diverged(run)
    run.progress.evaluated = run.step
    run.callbacks.on_eval_end(run, values)
    note_best(run, values)


def stop_if_diverged(run: Run) -> None:
    """Raise Diverged if the loss of the steps since the last `train` line is not finite. Collective."""
    if run.config.on_nonfinite is NonFinite.stop and not math.isfinite(run.world.sum(own_loss(run.means))[0]):
        raise diverged(run)


def try_evaluation(run: Run) -> None:
    """Evaluate `eval.sanity_batches` before the first step: a broken evaluation ends the run now, not an epoch later. Collective.

    Has no side effects: generators, metrics and buffers are unchanged, of the callbacks only `on_trial` is called, and nothing is
    compiled. A resumed run skips it.
    """
    most = run.config.eval.sanity_batches
    if not most or run.step or run.course.data.test is None or run.config.eval.every_steps == "off":
        return
    eager = torch.compiler.set_stance("force_eager") if run.config.compile else contextlib.nullcontext()

    def enter() -> bool:
        run.running.enter("evaluation")
        return True

    with kept_generators(on_device=True), run.measures.aside(), eager:
        values = measure_test(run, begin=enter, most=most) or {}
    if run.config.checkpoint.best:
        value_of(run.config.checkpoint.best, values, key="checkpoint.best")
    run.callbacks.on_trial(values)


def measure_test(run: Run, *, begin: Callable[[], bool], most: int | None = None) -> dict[str, float] | None:
    """Return the means over the test split, as `muster.train.evaluation.measure` does. Collective."""
    test, measures = run.course.data.test, run.measures
    return measure(run.config, test, run.strategy, run.world, measures, begin=begin, most=most)


def note_best(run: Run, values: dict[str, float]) -> None:
    """Record this step in `progress.best` if its `checkpoint.best` metric is the best so far. Collective."""
    if not (metric := run.config.checkpoint.best):
        return
    value, best = value_of(metric, values, key="checkpoint.best"), run.progress.best
    mode = best_mode(run.config, run.measures, best)
    run.progress.best = best_of(best, value, run.running.checkpoints, metric=metric, mode=mode, step=run.step)


def is_best(run: Run) -> bool:
    return run.progress.best is not None and run.progress.best["step"] == run.step


def is_time_to_save(run: Run) -> bool:
    """Return True if a checkpoint is due between two steps. After the last step, and when preempted, `train` saves in any case."""
    return (run.running.is_due("save") or is_best(run)) and not run.is_over and not run.is_preempted


def log(run: Run, result: StepResult) -> None:
    """Report the steps since the last line. Waits for the device. Collective."""
    means, own = run.means, own_loss(run.means)  # waits for the device

    def line(sums: list[float]) -> dict[str, Any]:
        loss = sums[0] / sums[1] if sums[1] else 0.0
        measured = run.world.sum_named(means.own(MEASURED)) if run.config.log.train_metrics else {}
        more = means_of_slices(measured, count=measured.pop(COUNTED, 0.0))
        more.pop(LOSS, None)
        check_names(more, "a metric", taken=OF_LINES)
        if not math.isfinite(loss) and run.config.on_nonfinite is NonFinite.stop:
            raise diverged(run)
        samples = run.course.plan.samples_before(run.step)
        known = {"epoch": epoch(run), "loss": loss, "lr": run.strategy.lr, "grad_norm": float(result.grad_norm)}
        memory = {"peak_memory_gib": round(max(sums[2:]), 2)} if sums[2:] else {}
        counted = sums[1] / means.samples if run.counts.are_plain and means.samples else None
        more = memory | more | means.take_logged()
        means.clear()
        return {**known, "samples": samples, "more": more, "counted": counted}

    run.running.log([*own, *peak_memory(run.world)], line)


def save(run: Run) -> None:
    """Start to write a checkpoint of this step. Collective.

    Raises Diverged instead of saving weights that are not finite: at the next save, or when the run ends.
    """
    running = run.running
    running.enter("save")
    run.callbacks.on_checkpoint(run)
    if run.strategy.has_diverged():
        raise diverged(run)
    finite = run.strategy.finite()
    running.save(run.trained.state, position(run), finite=finite)


def position(run: Run) -> dict[str, Any]:
    """Return the manifest's entries about the progress, beside the step."""
    return {
        "epoch": epoch(run),
        "samples": run.course.plan.samples_before(run.step),
        "evaluated": run.progress.evaluated,
        "best": run.progress.best,
        "stopped": run.progress.stopped,
    }


def count_skips(run: Run, result: StepResult) -> None:
    """Count consecutive steps skipped for a non-finite gradient, the same on all ranks. Raises Diverged above the limit."""
    run.progress.skipped_in_a_row = run.progress.skipped_in_a_row + 1 if result.skipped else 0
    if not result.skipped:
        return
    scaled = run.config.precision is Precision.fp16  # its gradient scaler finds the scale by trial, skipping steps
    stop = run.config.on_nonfinite is NonFinite.stop and not scaled
    if stop or run.progress.skipped_in_a_row > run.config.max_skipped_steps:
        raise diverged(run)
    run.records.event("skipped", step=run.step, in_a_row=run.progress.skipped_in_a_row)


def diverged(run: Run) -> Diverged:
    times = f" ({run.progress.skipped_in_a_row} in a row)" if run.progress.skipped_in_a_row else ""
    return Diverged(
        f"loss, gradient or weights are not finite at step {run.step}{times}: lower optimizer.lr, "
        "set grad_clip, or leave such steps out with on_nonfinite=skip"
    )


def epoch(run: Run) -> int:
    """Return the epoch of the last step done, from 0."""
    return run.course.plan.epoch(max(0, run.step - 1))
