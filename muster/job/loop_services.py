"""What happens between two steps of a user's loop, and at its end: log, save and stop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from muster import outcome
from muster.attempt.attempt import Attempt, open_checkpoints
from muster.attempt.best import known_best
from muster.attempt.intervals import Every, Intervals
from muster.attempt.lifecycle import Ending
from muster.attempt.records import open_records, report
from muster.attempt.running_means import RunningMeans
from muster.checkpoint.commit import Saved
from muster.checkpoint.tensor_versions import Changes
from muster.checkpoint.trained import plain
from muster.checkpoint.weights import write_weights
from muster.errors import ConfigError, Diverged, MusterError, Preempted, RankLost, final, of_code, say
from muster.files import replace_file
from muster.job.batch_source import BatchSource
from muster.job.bootstrap import Bootstrap, end_alike
from muster.job.consistency import Consistency
from muster.job.evaluation import Evaluations
from muster.job.loop_watch import LoopWatch
from muster.job.options import JobOptions, as_yaml, loggers_of, run_options_of
from muster.job.tracked_state import Tracked
from muster.job.trainee import JobTrainee, Reached, seed_step
from muster.loggers.metrics import Metrics
from muster.recovery.survival import why_none_survives
from muster.timing.clock import Clock
from muster.world.counts import OF
from muster.world.counts import means as averages

BODY_S = 10.0
"""How long an evaluation in a loop's body goes on after the ranks agreed to stop; launchers kill after 30 s."""
GONE_S = 2.0
"""How long ranks that got no step() for a batch look for the death of another."""
SILENT_S = 1.0
POLL_S = 0.05
SINCE = ", or at one since the `train` record before (log_every=1 names the step)"
ALTERED = (
    "{name} was changed after the loop: model.pt and the checkpoint of step {step} have its values of now, and a longer run goes on from them; load the best "
    "weights after the job, or into another module"
)
AMID = (
    "{what} of step {step} was saved within the next step, which has changed {changed} already, and which a resume makes again: call "
    "evaluate(best=...), or leave the loop, before the forward pass or after job.step()"
)
STALE = (
    "{what} of step {step} was saved before the loop changed {changed}: change it before job.step(), or in the rest of the body if the loop "
    "is over job.batches()"
)
UNCOUNTED = "{name} was called after step {step}, and job.step() was not: model.pt and the checkpoint of this step have what it changed"


class AgreedStop(SystemExit):
    """Leaves a loop whose ranks have agreed to stop after the same step."""

    def __init__(self, ending: Ending):
        super().__init__(Preempted.exit_code)
        self.ending = ending


class LoopServices:
    """An attempt at a run, from the restored state to its end. Collective: every rank must create it.

    Raises ConfigError: the checkpoint is of other tracked objects. Raises StorageError: it cannot be read.
    """

    def __init__(self, options: JobOptions, bootstrap: Bootstrap, tracked: Tracked):
        self.options, self.bootstrap, self.tracked = options, bootstrap, tracked
        self.world, self.start, self.folder = bootstrap.world, bootstrap.start, bootstrap.start.folder
        self.means, self.clock = RunningMeans(self.world), Clock()
        self.batch_source: BatchSource | None = None
        self.is_open = self.is_evaluating = False
        saved = self.start.saved
        self.intervals = Intervals(line=Every(options.log_every), save=Every(options.save_every))
        self.reached = Reached(saved.step, int(saved.manifest.get("samples", 0))) if saved else Reached()
        self.owes_save = self._is_asked_to_save = False
        """True between the end of a step after which a checkpoint is due, and its beginning."""
        self.is_within = False
        """True between the count of a step and the end of the loop's body, as the iterator of the batches sees it."""
        self.is_amid = False
        """True between a batch of `Job.batches` and the count of its step."""
        self._saved_at = saved.step if saved else -1
        """The last step that was saved; -1 if none was."""
        self.is_closed = self.has_left = False
        """True once that iterator is closed before its end, by `break` or by an error; and once it was by `break`."""
        self.is_told_to_stop = False
        """True once the loop has read that it should stop, so that leaving it is not its end."""
        self.raised: AgreedStop | MusterError | None = None
        """What has ended the loop's steps, and is raised again if the loop has caught it."""
        self._latest = 0.0
        self._at_end: Changes | None = None
        """The weights at the end of the loop over the batches."""
        if (
            self.world.again
        ):  # of a pass that a death has cut short, if the modules outlive the function that trains them
            for parameter in tracked.parameters():
                parameter.grad = None
        self.trainee = JobTrainee(self, bootstrap.kept)
        self.watch = LoopWatch(
            tracked, self.reached, self.world, tell=self.tell_once, refuse_survival=self.trainee.refuse
        )
        self.evaluations = Evaluations(tracked, self.world, enter=self._enter)
        self.consistency = Consistency(bootstrap, tracked)
        self.unfinished = self._unfinished()
        self.start.restore(self.trainee)
        seed_step(options.seed, self.world, self.reached.step)
        self.tracked.accumulation.mark()
        self.consistency.begin()
        writes = partial(report, self.folder.path) if self.world.is_first else None
        bootstrap.life.restored(self.reached, report=writes)
        self.peers = bootstrap.life.run()

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run; 0 if unknown."""
        return self.batch_source.total_steps if self.batch_source else 0

    @property
    def is_over(self) -> bool:
        """True if all steps are done; False if their number is unknown."""
        return self.batch_source is not None and self.reached.step >= self.batch_source.total_steps

    @property
    def is_left(self) -> bool:
        """True if an earlier attempt is done, whose loop has left these batches before their end."""
        before, saved, here = self.folder.before, self.start.saved, (self.reached.step, self.total_steps)
        if before.outcome == outcome.DONE and (before.step, before.total_steps) == here:
            return True  # also by the record alone: the step may have been saved before the loop was left
        manifest = saved.manifest if saved else {}  # the record may be of a command that was refused since
        return bool(manifest.get("left")) and (manifest["step"], manifest.get("total_steps")) == here

    @property
    def epoch(self) -> int:
        """The epoch of the last step done, from 0; 0 if unknown."""
        return max(0, self.reached.step - 1) // self.batch_source.steps_per_epoch if self.batch_source else 0

    def open(self, batch_source: BatchSource | None) -> None:
        """Open records and checkpoints. Collective.

        batch_source: None if the loop has batches of its own.
        Raises ConfigError, DataError: the batches differ between ranks, or from those of the checkpoint.
        """
        self.batch_source, facts, known = batch_source, dict[str, Any](), dict[str, Any]()
        if batch_source:
            self.consistency.refuse_batches(batch_source)
            facts = batch_source.facts
            known = {"samples_per_epoch": batch_source.samples_per_epoch, "batch_size": facts.get("batch_size")}
        self.world.on_first(partial(self._write_config, facts))
        opened = partial(
            open_records,
            self.folder.path,
            self.world,
            name=self.folder.path.name,
            step=self.reached.step,
            samples=self.reached.samples,
            total_steps=self.total_steps,
            makers=loggers_of(self.options),
        )
        records = self.start.open_records(self.world, opened)
        self.running = running = self._run(records, facts)
        self.bootstrap.life.on_end(running.close, failed=running.close)
        known = {name: value for name, value in known.items() if value}
        why_not = why_none_survives(self.world, self.bootstrap.why_no_survival)
        notes = self.consistency.notes(batch_source, step=self.reached.step, why_not=why_not)
        self.is_open = True
        self.start.tell(running, notes, save=self.save, total_steps=self.total_steps, **known)
        look_away = self.watch.open(batch_source, is_new=self.begins)
        self.bootstrap.life.on_end(look_away, failed=look_away, parted=look_away)
        self.bootstrap.kept.follow(self.trainee, self.folder)
        self.bootstrap.await_saved = self.await_saved
        running.start()

    def _run(self, records: Metrics, facts: dict[str, Any]) -> Attempt:
        saved = {
            "tracked": self.tracked.names,
            "built": self.consistency.built,
            "layers": self.consistency.layers,
            "own": self.consistency.own,
            "batches": facts,
            "total_steps": self.total_steps,
            "drawn": self.world.broadcast(self.bootstrap.kept.drawn),
        }
        options, keep = run_options_of(self.options), self.options.keep
        running = Attempt(
            peers=self.peers,
            progress=self.reached,
            total_steps=self.total_steps,
            records=records,
            checkpoints=open_checkpoints(
                options,
                folder=self.folder,
                world=self.world,
                records=records,
                keep=keep,
                facts=saved,
                newest_step=self.start.newest_step,
            ),
            clock=self.clock,
            means=self.means,
            intervals=self.intervals,
        )
        running.checkpoints.best = self.evaluations.best
        return running

    def remembering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, and remember an error that ends them."""
        try:
            yield from batches
        except RankLost:
            raise
        except MusterError as error:
            self.raised = of_code(error.exit_code, str(error))
            raise

    def note(self, values: Mapping[str, Any], *, weight: float) -> None:
        """Add means over `weight` samples of this rank to those of the next record."""
        if weight:
            for name, value in values.items():
                self.means.add({name: value}, times=weight)
                self.means.add({f"{name}{OF}": weight})

    def advance(self, *, samples: int) -> None:
        """Count a step of `samples` samples of all ranks, and log if it is time to. Collective."""
        self.tracked.accumulation.count()
        self.is_within, self.is_amid = True, False
        self.reached.step += 1
        self.reached.samples += samples
        self.running.records.advance(self.reached.step)
        if self.is_time_to_log():
            self.log()

    def is_time_to_log(self) -> bool:
        return self.is_over or self.intervals.is_due("line", self.reached)

    def end_step(self) -> None:
        """Save at the interval, after the body of the loop has ended. Collective."""
        is_due = self.intervals.is_due("save", self.reached) and not self.is_over
        self.owes_save, self._is_asked_to_save = is_due or self._is_asked_to_save, False
        self.watch.end_step(epoch=self.epoch, is_saved=self.owes_save)
        self.tracked.accumulation.end_step()
        self.trainee.end_step()
        self.is_within = False
        if self.is_over:
            self.look_at_end()
        if self.owes_save:  # after the last step it is done at the end
            self.save()
            self.owes_save = False
        seed_step(self.options.seed, self.world, self.reached.step)

    def begin_step(self) -> None:
        """Begin the next step, unless the ranks have agreed to stop before it. Collective. Raises AgreedStop."""
        self.bootstrap.kept.has_worked = True
        if not self.running.begin("step"):
            self.stop()
        self.is_amid = self.batch_source is not None
        self.watch.begin_step()

    def log(self) -> None:
        """Write a `train` record of the steps since the last one. Waits for the device. Collective."""
        means, logged = averages(self.world.sum_named(self.means.own())), self.means.take_logged()
        self.means.clear()
        if both := sorted(means.keys() & logged.keys()):
            raise ConfigError(
                f"log({both[0]}=...): step({both[0]}=...) gives the record a mean of that name: choose another"
            )
        means |= logged
        loss = means.pop("loss", None)
        if loss is not None and not math.isfinite(loss):
            raise self._diverged("the loss is", since="" if self.options.log_every == 1 else SINCE)
        known = {"epoch": self.epoch, "loss": loss, "lr": means.pop("lr", self.tracked.lr)}
        known |= {"grad_norm": means.pop("grad_norm", None), "samples": self.reached.samples}
        self.running.log([], lambda _: {**known, "more": means})

    def refuse_no_step(self) -> NoReturn:
        """Raise ConfigError: no step() came for a batch; or RankLost: a rank has died, and the loop has caught torch's error.

        A death shows by a replacement, or else by another rank's report, a missing heartbeat, or the launcher's signal.
        """
        lost = RankLost("a rank has died, and the loop has caught the error of torch.distributed that tells of it")
        if self.world.size > 1 and (self.bootstrap.life.survives(lost) or self._is_one_gone()):
            raise lost
        raise ConfigError(
            f"no step() came for batch {self.reached.step}: call it once for each batch of batches(), and let errors of "
            "torch.distributed pass, by which a rank learns that another is gone"
        )

    def _is_one_gone(self) -> bool:
        """True if a rank is silent, or leaves for another reason than a mistake, or the launcher ends this one."""
        heartbeat, deadline = self.peers.heartbeat, time.monotonic() + GONE_S
        heartbeat.watch()

        def is_told() -> bool:
            return self.bootstrap.preemption.signalled or heartbeat.silence(SILENT_S) is not None

        failure = self.world.store_keys.first_failure(GONE_S, enough=is_told)
        while (
            failure is None and not is_told() and time.monotonic() < deadline
        ):  # the store is gone: heartbeats will tell
            time.sleep(POLL_S)
        return is_told() if failure is None else failure["exit_code"] not in final()

    @property
    def _owes_body(self) -> bool:
        """True if the rest of the loop's body is still to come: it belongs to the last step."""
        return self.is_within and not self.has_left

    def _begun(self) -> str:
        """See `Accumulation.begun`; empty after the last step."""
        return "" if self.is_over else self.tracked.accumulation.begun(ends_with_count=self.batch_source is None)

    def _has_begun(self) -> bool:
        """Return True if the next step has begun on a rank. Collective."""
        return self.world.lowest(bool(self._begun())) is not None

    def ask_to_save(self) -> None:
        """Save this step; in the body of a loop over batches, the step at its end, which all that it changes belongs to. Collective."""
        if (self.is_within or self.is_amid) and not self.has_left:
            self._is_asked_to_save = True
        else:
            self._save_now()

    def _save_now(self, *, what: str = "the checkpoint") -> None:
        """Save this step, with a note if the next one has begun, or the step has been saved before its end. Collective."""
        step, is_saved = self.reached.step, self.reached.step == self._saved_at
        text, changed = (
            (STALE, self.tracked.accumulation.state.changed(tensors=self.is_amid))
            if is_saved
            else (AMID, self._begun())
        )
        if changed := next(filter(None, self.world.gather(changed)), ""):
            self.tell_once(f"{what} {text}", text.format(what=what, step=step, changed=changed))
        self.save()

    def see_left(self) -> None:
        """Note that the loop was left by `break`, so that its last body has ended. Collective.

        An error closes the iterator, too; but then the job is asked nothing more.
        """
        if not self.is_closed:
            return
        self.has_left = True
        self.save_as_asked()

    def save_as_asked(self) -> bool:
        """Save if the loop has asked for it in a body that it then left; return whether it is saved. Collective."""
        is_asked, self._is_asked_to_save = self._is_asked_to_save, False
        if is_asked and self.world.lowest(bool(self.tracked.accumulation.uncounted())) is not None:
            if self.world.is_first:
                say(
                    f"muster: step {self.reached.step} is not saved: the loop was left between optimizer.step() and job.step()"
                )
            return False
        if is_asked:
            self._save_now()
        return is_asked

    def save(self) -> None:
        """Start to write a checkpoint of this step. Collective. Raises Diverged, StorageError."""
        if not self.tracked.is_finite():
            raise self._diverged("a weight is")
        if text := self.evaluations.swapped(self.reached.step):
            self.tell_once("swapped", text)
        self.consistency.refuse_apart()
        self.consistency.refuse_rates()
        self.running.save(self.trainee.state, self.position())
        if name := self.tracked.first_apart:
            self.trainee.refuse(f"{name} differs between ranks, so no rank has that of another")
        self._saved_at = self.reached.step

    def await_saved(self, checkpoint: str | None) -> None:
        """Wait until this rank sees what has been saved. Raises ConfigError: the checkpoint that is meant is still to be saved."""
        best, step = self.evaluations.best, self.reached.step
        is_meant = checkpoint in (None, "newest") or (checkpoint == "best" and best and best["step"] == step)
        if self._is_asked_to_save and is_meant and step != self._saved_at:
            raise ConfigError(
                f"load(..., checkpoint={checkpoint!r}) came before that checkpoint is saved, which is once the loop's body has ended: call it after the "
                "loop, or, if that is left by break or its iterator is in a variable, after the job"
            )
        self.running.checkpoints.wait()

    def look_at_end(self) -> None:
        """Note the weights at the end of the loop."""
        self._at_end = Changes(self.tracked.named.items())
        self._at_end.look()

    @property
    def begins(self) -> bool:
        """True if no attempt before has made a step that this one goes on from."""
        return self.start.saved is None and not self.world.again

    def position(self) -> dict[str, Any]:
        """Return the progress for a checkpoint's manifest."""
        left = {"left": True} if self.has_left and not (self.is_told_to_stop or self.is_over) else {}
        return {"epoch": self.epoch, "samples": self.reached.samples, "best": self.evaluations.best, **left}

    def goes_on(self, phase: str) -> bool:
        """Enter a phase of the body; return False if the ranks agreed to stop and must not finish it. Collective.

        The body of a counted step has `BODY_S` to end, so that the step can be saved.
        """
        if self.peers.begin(phase, self.reached.step):
            return True
        self._latest = self._latest or time.monotonic() + BODY_S
        return self._owes_body and self.world.lowest(time.monotonic() > self._latest) is None

    def stop(self) -> NoReturn:
        """Save the step at which all ranks have stopped. Collective. Raises AgreedStop.

        A step whose body has not ended is not saved, nor one after which the next has begun: the resumed run repeats it from the checkpoint
        before.
        """
        if is_whole := not (self._owes_body or self._has_begun()):
            self._save_now()
        self.raised = AgreedStop(self.running.stopped(is_saved=is_whole))
        raise self.raised

    def end_stopped(self, stop: AgreedStop) -> None:
        """Collective."""
        self.bootstrap.life.end(stop.ending)

    def end_done(self) -> None:
        """Save the last step and record that the run is done. Collective."""
        step, saved, running = self.reached.step, self.start.saved, self.running
        self.peers.heartbeat.enter("end", step)
        end_alike(self.world, self.peers.heartbeat, step)
        if saved and step == saved.step and self.folder.before.outcome == outcome.DONE:
            running.records.event("done", step=step, note="finished already")
            return self.bootstrap.life.end(running.ending(), report=False)
        self.has_left = True
        if self._at_end and (name := self._at_end.changed() or self._at_end.changed_unseen()):
            self.tell_once("altered", ALTERED.format(name=name, step=step))
        elif name := self.tracked.accumulation.uncounted():
            self.tell_once("uncounted", UNCOUNTED.format(name=name, step=step))
        self.save()
        ending = running.done()
        self.peers.heartbeat.enter("finish", step)
        self.world.together(self._write_model())
        if late := self.means.take_logged():
            running.records.event_once("logged", step=step, **late)
        running.records.event_once("done", step=step, output_dir=str(self.folder.path))
        running.close()  # before the report, which has the last window
        self.bootstrap.life.end(ending)

    def _unfinished(self) -> list[int]:
        """Return the run's step and number of steps, if its own checkpoint says that it is not done; else an empty list."""
        saved, before = self.start.saved, self.folder.before
        if saved is None or saved.storage.root != run_options_of(self.options).checkpoints.root:
            return []
        total = saved.manifest.get("total_steps") or 0
        is_done = before.outcome == outcome.DONE or saved.manifest.get("left") or saved.step >= total
        return [] if is_done else [saved.step, total]

    @property
    def is_called_again(self) -> bool:
        """True in the first step of a function that was called again after the death of a rank."""
        return self.world.again and self.watch.begun <= 1

    @property
    def is_untrained(self) -> bool:
        """True if an attempt at a run whose batches are not at their end has not asked for them: it may have evaluated."""
        return self.batch_source is None and self.unfinished[:1] == [self.reached.step]

    def end_untrained(self) -> None:
        """Leave the run at its step. Collective."""
        step, total = self.unfinished
        self.peers.heartbeat.enter("end", step)
        end_alike(self.world, self.peers.heartbeat, step)
        if self.world.is_first:
            say(f"muster: this attempt has asked for no batches, and leaves the run at step {step} of {total}")
        self.bootstrap.life.end(Ending(step, total, is_left=True), report=False)

    def settle(self) -> None:
        if self.is_open:
            self.running.settle()

    def _write_model(self) -> MusterError | None:
        """Write model.pt if there is a model: the module of this name, or the only one."""
        modules = self.tracked.modules
        model = modules.get("model") or (next(iter(modules.values())) if len(modules) == 1 else None)
        if model is None:
            return None
        weights: dict[str, Tensor] = {plain(name): value for name, value in model.state_dict().items()}
        return write_weights(self.folder.path / "model.pt", weights, writes=self.world.is_first)

    def _diverged(self, what: str, *, since: str = "") -> Diverged:
        return Diverged(
            f"{what} not finite at step {self.reached.step}{since}: lower the learning rate, or clip the gradients"
        )

    def _write_config(self, facts: Mapping[str, Any]) -> None:
        known = {"loader": {"drop_last": facts["drop_last"]}} if "drop_last" in facts else {}
        text = as_yaml(self.options, **facts, **known)
        replace_file(self.folder.path / "config.yaml", lambda draft: draft.write_text(text, encoding="utf-8"))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do not journal the modules' buffers as this rank's own in this context: an evaluation uses rank 0's."""
        self.is_evaluating, are_own = True, not (self.is_within and self.trainee.are_changed())
        try:
            with self.tracked.accumulation.aside():
                yield
        finally:
            self.is_evaluating = False
            if are_own:  # else a body has put in others, and puts its own back
                self.trainee.note_buffers()

    def best_before(self, saved: Saved) -> dict[str, Any] | None:
        """Return the best evaluation of the attempts up to the checkpoint `saved`. Collective."""
        own = run_options_of(self.options).checkpoints
        found: dict[str, Any] | None = self.world.on_first(partial(known_best, self.folder.path, saved, own))
        return found

    def choose(self, values: Mapping[str, float], dataset: Any, *, metric: str, mode: str) -> None:
        """Save this step if its evaluation on `dataset` is the best so far. Collective.

        One before the first step does not count, nor one of an attempt that has not asked for the batches that are left.
        """
        step, counts = self.reached.step, self.reached.step and not self.is_untrained
        how: dict[str, Any] = {"checkpoints": self.running.checkpoints if counts else None, "note": self._note}
        if not self.evaluations.choose(values, dataset, metric=metric, mode=mode, step=step, **how):
            return
        if self._owes_body:
            self._is_asked_to_save = True
        else:
            self._save_now(what="the best checkpoint")

    def _note(self, text: str) -> None:
        self.running.records.event("note", text=text)

    def _enter(self, phase: str) -> None:
        self.peers.heartbeat.enter(phase, self.reached.step)

    def tell_once(self, what: str, text: str) -> None:
        """Record a note, unless an earlier attempt, which a rank's death has ended, has recorded it."""
        if what not in self.bootstrap.kept.told:
            self.bootstrap.kept.told.add(what)
            self._note(text)
