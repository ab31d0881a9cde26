"""`Job`: one attempt at a run whose training loop is a user's own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from muster.attempt.lifecycle import State
from muster.attempt.running_means import number
from muster.checkpoint.schemas import Best
from muster.code_location import AGAIN, described
from muster.data.fetch import unsplit
from muster.data.generators import key_of, seed_generators
from muster.data.loader import LoaderConfig
from muster.errors import ConfigError, Diverged, MusterError
from muster.job.batch_source import BatchSource, PlannedSource, Portion, batch_source, counted, is_loader
from muster.job.bootstrap import Bootstrap
from muster.job.evaluation import Measure, evaluate
from muster.job.in_process_restart import run
from muster.job.loop_services import AgreedStop, LoopServices
from muster.job.options import JobOptions
from muster.job.replicas import settle_buckets
from muster.job.summed_loss import BACKWARD, SUMMED, is_for_a_number, is_sum
from muster.job.tracked_state import Tracked
from muster.loggers.metrics import check_names
from muster.sample_plan import Share

GROUP_GONE = "the process group was ended before the job, which needs it to its end and then ends it: leave out destroy_process_group()"
CALLED_AGAIN = f"{AGAIN}the function was called again: what it keeps outside of tracked objects, as a list in a module, is still that of before)"


@dataclass(eq=False)
class Job(JobOptions):
    """One attempt at a run, for a training loop of your own: exact resume, one writer, preemption, records, a report.

    A context manager around the loop; `JobOptions` describes its arguments. Entering it forms the process group, unless
    one exists, and claims the run's folder. Leaving it saves the last step and records that the run is done. An error
    in the block ends the process with the error's exit code, after one line that names the first cause. SIGTERM stops
    all ranks after the same step, saves it and ends with 75 (`SystemExit`); the same command resumes.

        with muster.Job("runs/mine", save_every=100) as job:
            model = DDP(Net().to(job.device))
            optimizer = AdamW(model.parameters())
            job.track(model=model, optimizer=optimizer)
            for inputs, targets in job.batches(dataset, batch_size=64, epochs=3):
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                job.step(loss=loss)

    All ranks must make the same calls in the same order. Misuse raises ConfigError, which ends with exit code 2.
    """

    def __post_init__(self) -> None:
        self._bootstrap, self._process = Bootstrap(self), os.getpid()
        self._services: LoopServices | None = None
        self._portion, self._of_step, self._counts = Portion(None), 0.0, ""
        self._is_owed = self._is_weighed = False

    def __enter__(self) -> Self:
        self._bootstrap.enter()
        seed_generators(key_of(self.seed), on_device=True)  # the same initial weights on every rank
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._process:
            return False  # a forked child leaves: the run is its parent's
        try:
            error = self._end(error)
        except BaseException as late:
            error = late
        return self._bootstrap.leave(error)

    def _end(self, error: BaseException | None) -> BaseException | None:
        """End a run that is done or has stopped; return any other error."""
        is_of_script = isinstance(error, Exception) and not isinstance(error, MusterError)
        if self._bootstrap.is_group_gone and (error is None or is_of_script or _is_done(error)):
            gone = ConfigError(GROUP_GONE)
            gone.__cause__ = error
            return gone
        stop = self._services and self._services.raised  # which the loop may have caught
        if self._services and isinstance(stop, AgreedStop) and (error in (None, stop) or _is_done(error)):
            self._services.end_stopped(stop)
            return None
        if isinstance(error, Diverged) and self._services:  # on all ranks at once: their checkpoint writers still live
            self._services.settle()
        if error is None or _is_done(error):
            services = self._opened("the end of the `with` block")
            if stop := self._stop_of(services):
                services.end_stopped(stop)
            elif services.is_untrained:
                services.end_untrained()
            else:
                services.end_done()
            return None
        if isinstance(error, SystemExit) and self._services and self._services.save_as_asked():
            self._services.settle()
        if isinstance(error, Exception) and self._services and self._services.is_called_again:
            error.add_note(CALLED_AGAIN)
        return error

    @staticmethod
    def _stop_of(services: LoopServices) -> AgreedStop | None:
        """Save the last step of a loop that was left because of `should_stop`, and return the stop."""
        if not services.is_told_to_stop:
            return None
        services.has_left = True
        try:
            services.stop()
        except AgreedStop as stop:
            return stop

    def run(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function(job, *arguments)` in the `with` block of this job: a rank that a signal kills is restarted in place.

            muster.Job("runs/mine", save_every=100).run(main)

        Under torchrun on CPUs the script goes on in a child of this process, with the function and with what follows `run`, and
        this process waits for its end. When a rank dies, all others leave the function by an exception, meet the replacement,
        and the function is called again on all ranks, in the same process: `track` then
        restores the state of a rank that is alive, and `batches` goes on with the next step. So what the function does
        before the loop is done again, and nothing outside of the tracked objects may remember the steps. What is loaded
        before `run` is there at once.

        Where ranks cannot be restarted in place, the records say why, and the death of one restarts all.
        """

        def enter(job: Job, bootstrap: Bootstrap) -> None:
            job._bootstrap = bootstrap
            with job:
                function(job, *arguments)
            if not bootstrap.has_parted:  # what can be read after the run is the same in either case
                vars(self).update(vars(job))

        run(self, enter)

    # What the loop calls

    def track(self, **things: Any) -> None:
        """Name all objects whose state belongs into checkpoints, and restore them. Call it once, before the loop.

        Modules (also in DistributedDataParallel, or sharded by fully_shard) and optimizers are saved tensor by tensor,
        and resume at any world size. Any other object with `state_dict()` and `load_state_dict()` is saved as one value:
        once if it is equal on all ranks, else by each rank, and then it needs as many ranks again. The generators of
        Python, NumPy and torch are saved for each rank. Collective: every rank must call it.

        Raises:
            ConfigError: names or shapes differ between ranks, or from those of the checkpoint.
        """
        if self._services or not things:
            raise ConfigError(
                "track() was called twice: name everything in one call"
                if self._services
                else "track() names nothing: track(model=model, optimizer=optimizer)"
            )
        world, tracked, failure = self._bootstrap.world, None, None
        try:
            tracked = Tracked(things, world)
        except MusterError as error:
            failure = error
        names = ", ".join(sorted(things))
        world.same("track():", names, remedy="track the same names on every rank", error=ConfigError)
        world.together(failure)
        assert tracked
        shapes = tracked.shapes()
        world.same("shapes of the modules: digest", shapes, remedy="build the same on every rank", error=ConfigError)
        self._services = LoopServices(self, self._bootstrap, tracked)
        settle_buckets(tracked.modules.values(), world)

    def batches(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        count: Callable[[Any], Any] | None = None,
        weights: Any = None,
    ) -> Iterator[Any]:
        """Yield this rank's batches of each step that is left, on the device. Call `step` once for each.

        Of a data set, every step takes the next `batch_size` samples of the epoch's order, whatever the number of
        ranks, and each rank gets its share of them. Where the shares are not equal, multiply the loss by `weight`. What
        the loop does after `step` belongs to the step: it is done before a checkpoint or a stop.

        A mean that is not over samples, but over tokens that are not padding, say, needs `count`; then `weight` makes it the
        mean over the global batch, whatever the ranks and micro-batches, and a record's loss is divided by the same count.

        Args:
            source: a data set with `__len__` and `__getitem__`, an IterableDataset with `__len__`, or a DataLoader of
                your own. A DataLoader keeps its own batch size, and resumes exactly with as many ranks as before.
            batch_size: samples per optimizer step over all ranks (not per rank); None with a DataLoader.
            micro_batch_size: maximum number of samples in a batch of a rank. A step then has several batches: add up
                their gradients, each by `weight`, and step the optimizer where `ends_step` is true. None: one batch.
            epochs: passes over the data; None: `max_steps`.
            max_steps: number of steps; None: `epochs`.
            shuffle: order each epoch by `seed`; an IterableDataset has its own order.
            drop_last: drop the last batch of an epoch if it is smaller.
            num_workers: processes per rank that load samples.
            collate_fn: turns a list of samples into a batch; None: torch's default_collate.
            weights: one number for each sample of a data set: `len(dataset)` samples an epoch are drawn with these weights, with
                replacement, as by torch's WeightedRandomSampler, and alike at any number of ranks. None: each sample once.
            count: gets a batch, and returns what its mean loss is over, a number or a tensor []; None: samples.

        Raises:
            ConfigError: an argument is not valid, or differs from that of the checkpoint.
            DataError: the data has changed since the checkpoint, or a sample cannot be read.
        """
        services = self._going_on("batches()")
        if services.is_open:
            raise ConfigError(
                "batches() was called twice, or after step(), evaluate() or save(): call it once, before them; it yields all epochs"
            )
        made = batch_source(
            source,
            batch_size=batch_size,
            epochs=epochs,
            max_steps=max_steps,
            shuffle=shuffle,
            drop_last=drop_last,
            weights=weights,
            loader=self._loader(num_workers, collate_fn, micro_batch_size=micro_batch_size),
        )
        made.facts["count"] = count is not None
        services.open(made)
        is_counted = count is not None or (
            collate_fn is not None and isinstance(made, PlannedSource)
        )  # which may leave samples out
        return services.remembering(self._portions(services, made, count, is_counted=is_counted))

    def step(self, loss: Tensor | float | None = None, *, samples: int | None = None, **values: Any) -> None:
        """Count an optimizer step; log, save and stop where it is time to. Collective: every rank must call it.

        Call it for each batch of `batches`; a step of several micro-batches is counted with its last one.

        Args:
            loss: mean over this rank's samples of the batch, or over what `batches(count=...)` counts in it.
            samples: this rank's samples of the batch; None: as `batches` knows.
            **values: more means over the same, to log beside the loss.

        Raises:
            Diverged: the mean loss since the last record, or a weight to be saved, is not finite.
        """
        services = self._opened("step()")
        if services.batch_source and not self._is_owed:
            raise ConfigError("step() was called without a new batch: call it once for each batch of batches()")
        self._is_owed, portion = False, self._portion
        self._note_weight(services)
        check_names(values, "step()")
        meaning = "the mean over this rank's samples"
        known = {name: value for name, value in {"loss": loss, **values}.items() if value is not None}
        for name, value in known.items():
            _refuse_other(value, what=f"step({name}=...)", meaning=meaning)
        weight: float = portion.count if portion.total else 1
        if portion.of is not None:
            weight = portion.of
        if self.world_size > 1 and is_sum(loss) and services.tracked.are_averaged:
            services.tell_once("sum", SUMMED)
        services.note(known, weight=weight if samples is None else samples)
        if not portion.ends:
            if text := services.tracked.accumulation.early():
                services.tell_once("early", text)
        else:
            services.advance(samples=portion.total or (samples or 0) * self.world_size)
        if not services.batch_source:
            services.end_step()
            services.begin_step()

    def save(self) -> None:
        """Save a checkpoint of this step, in the background. Collective: every rank must call it.

        In a loop over `batches` it is saved once the loop's body has ended, with the step that this makes.

        Raises:
            Diverged: a weight is not finite.
            StorageError: three checkpoints in a row could not be written.
        """
        services = self._between_steps("save()")
        services.tracked.accumulation.refuse("save()")
        services.ask_to_save()

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to the next `train` record. Those of rank 0 are written.

        Raises:
            ConfigError: a value is not a number or a tensor of one element, or records use its name themselves.
        """
        services = self._tracked("log()")
        check_names(values, "log()")
        for name, value in values.items():
            _refuse_other(value, what=f"log({name}=...)", meaning="of this rank")
            services.means.logged[name] = number(value)

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        best: str | None = None,
        best_mode: str = "auto",
    ) -> dict[str, float]:
        """Return and log the means of `measure` over `dataset`, each sample exactly once at any world size.

        Meanwhile the tracked modules are in evaluation mode and gradients are off; the random number generators are left
        unchanged. Collective: every rank must call it.

        Args:
            dataset: a data set with `__len__` and `__getitem__`.
            measure: gets a batch on the device, and returns name -> tensor [B], one value per sample; or a pair (sums, counts)
                of them, for a mean over something else than samples, such as tokens. It is called as often on each rank: one that has no
                batch left gets a sample that does not count. Random numbers that it draws follow from `seed` and the batch; those that
                `dataset` draws, from `seed` and the sample.
            batch_size: samples of a batch that `measure` gets. The batches are the same at any world size: ranks take them in turn.
            num_workers: as for `batches`.
            collate_fn: as for `batches`.
            best: name of one of the means: also keep the checkpoint of the step with its best value, which `Job.best` and best.json name.
            best_mode: `min` if less of it is better, `max` if more is; `auto`: as its name says (`loss`, `mae`, `accuracy`).

        Raises:
            ConfigError: `best` is not measured, or its name does not say which value is the best.
        """
        services = self._between_steps("evaluate()")
        services.tracked.accumulation.refuse("evaluate()")
        if not is_loader(dataset):  # which is refused
            services.evaluations.refuse_other_samples(dataset)

        def measured() -> dict[str, float] | None:
            with services.evaluating():
                return evaluate(
                    dataset,
                    measure,
                    batch_size=batch_size,
                    world=services.world,
                    modules=services.tracked.modules.values(),
                    loader=self._loader(num_workers, collate_fn),
                    begin=lambda: services.goes_on("evaluation"),
                )

        values = services.running.evaluate(measured, epoch=services.epoch)
        if values is None:
            services.stop()
        services.peers.heartbeat.enter("step", self.steps_done)
        if text := services.evaluations.twice(values, step=self.steps_done, size=len(dataset)):
            services.tell_once("twice", text)
        if best is not None:
            services.choose(values, dataset, metric=best, mode=best_mode)
        return values

    def sum(self, value: float | Tensor) -> float:
        """Return the sum of `value` over all ranks, in float64. Collective: every rank must call it.

        Raises:
            ConfigError: `value` is not a number or a tensor of one element.
        """
        _refuse_other(value, what="sum(...)", meaning="this rank's summand")
        return self._bootstrap.world.sum([number(value)])[0]

    @property
    def should_stop(self) -> bool:
        """True once all ranks have agreed to stop: leave the loop, and the end of the block saves and ends with 75.

        `step` and `batches` stop by themselves; a loop that takes long between two steps reads this. Collective: every
        rank must read it at the same point.
        """
        services = self._between_steps("should_stop")
        services.tracked.accumulation.refuse("should_stop")
        services.is_told_to_stop = not services.peers.begin("step", self.steps_done)
        return services.is_told_to_stop

    # What the loop can see

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._bootstrap.world.device

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._bootstrap.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._bootstrap.world.size

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self._bootstrap.world.is_first

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self._tracked("steps_done").reached.step

    @property
    def best(self) -> Best | None:
        """The best evaluation over all attempts, by `evaluate(best=...)`: its `metric`, `value` and `step`; None before the first."""
        found = self._tracked("best").evaluations.best
        return Best(**found) if found else None

    @property
    def epoch(self) -> int:
        """The epoch of the present batch of `batches`, from 0."""
        services = self._tracked("epoch")
        return (
            self.steps_done // services.batch_source.steps_per_epoch
            if self._is_owed and services.batch_source
            else services.epoch
        )

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch of `batches`, once it was called; 0 before, and for a loop that iterates by itself."""
        made = self._tracked("steps_per_epoch").batch_source
        return made.steps_per_epoch if made else 0

    @property
    def ends_epoch(self) -> bool:
        """True for the last batch of an epoch of `batches`, before and after its `step`."""
        made, done = self._tracked("ends_epoch").batch_source, self.steps_done + self._is_owed
        is_there = self._is_owed or self._portion.batch is not None
        return bool(made and is_there and self.ends_step and done and done % made.steps_per_epoch == 0)

    @property
    def ends_step(self) -> bool:
        """True for the last micro-batch of a step of `batches`, after which the optimizer's turn comes."""
        return self._portion.ends

    @property
    def weight(self) -> float:
        """What to multiply a mean loss over this rank's samples by, for the exact mean gradient over the global batch.

        1 if a step has one batch and all ranks have equally many samples of it, 0 on a rank that has none: its batch is one sample that
        does not count. With `batches(count=...)`, the same of what that counts.
        """
        self._is_weighed = self._is_weighed or not is_for_a_number(sys._getframe(1))
        portion = self._portion
        if portion.of is not None:
            return portion.of * self.world_size / self._of_step if self._of_step else 0.0
        return portion.count * self.world_size / portion.total if portion.total else 1.0

    # Private

    def _tracked(self, what: str) -> LoopServices:
        if self._services is None:
            raise ConfigError(
                f"{what} came before track(): name what is to be saved, track(model=model, optimizer=...)"
            )
        return self._services

    def _going_on(self, what: str) -> LoopServices:
        """Raise again what has ended the loop's steps, if the loop has caught it, as by a bare `except`."""
        services = self._tracked(what)
        if services.raised:
            raise services.raised
        return services

    def _opened(self, what: str) -> LoopServices:
        services = self._going_on(what)
        if self._bootstrap.life.state == State.ended:
            raise ConfigError(f"{what} came after the end of the `with` block: call it there")
        if not services.is_open:
            services.open(None)
        return services

    def _between_steps(self, what: str) -> LoopServices:
        services = self._opened(what)
        services.see_left()
        if not (self._portion.begins if self._is_owed else self._portion.ends):
            raise ConfigError(f"{what} came between two micro-batches of a step: call it after step() if job.ends_step")
        return services

    def _loader(
        self,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        micro_batch_size: int | None = None,
    ) -> LoaderConfig:
        share = Share(self.rank, self.world_size, micro_batch_size)
        return LoaderConfig(share, self.device, self.seed, num_workers, collate=collate_fn, adapter=unsplit)

    def _portions(
        self, services: LoopServices, made: BatchSource, count: Callable[[Any], Any] | None, *, is_counted: bool
    ) -> Iterator[Any]:
        self._counts = "samples" if count is None else "of what batches(count=...) counts"
        begin = made.total_steps if services.is_left else services.reached.step
        portions = made.portions(begin)
        for portion in services.clock.waiting(counted(portions, count) if is_counted else portions):
            if portion.begins:
                services.begin_step()
                self._of_step = services.world.sum([portion.of_step])[0] if is_counted else 0.0
                services.watch.see_batch(portion.batch, is_whole=portion.ends, has_count=count is not None)
            self._portion, self._is_owed, self._is_weighed = portion, True, False
            try:
                yield portion.batch
            except GeneratorExit:
                services.is_closed = True
                if self._bootstrap.life.state != State.ended:  # as of an iterator that a script keeps to its end
                    with contextlib.suppress(Exception):  # a device may have failed
                        services.look_at_end()
                raise
            if self._is_owed:
                services.refuse_no_step()
            if portion.ends:
                services.end_step()

    def _note_weight(self, services: LoopServices) -> None:
        """Say once that a step's batches are unequal, or several, and that the loop does not use `weight`."""
        portion, counted = self._portion, self._portion.of is not None
        own, all_of_them = (portion.of, self._of_step) if counted else (portion.count, portion.total)
        if self._is_weighed or own is None or own * self.world_size == all_of_them:
            return
        what = self._counts if counted else "samples"
        services.tell_once(
            "weight",
            f"step {self.steps_done} has {all_of_them:g} {what}, not as many in each batch of {self.world_size} ranks: for the exact "
            f"gradient use {BACKWARD}",
        )


def _refuse_other(value: Any, *, what: str, meaning: str) -> None:
    if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise ConfigError(f"{what} is {described(value)}: give a number or a tensor of one element, {meaning}")


def _is_done(error: BaseException) -> bool:
    """Return True for `sys.exit()` and `sys.exit(0)`."""
    return isinstance(error, SystemExit) and not error.code
