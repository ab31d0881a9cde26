"""What happens between two steps of a user's loop, and at its end: log, save and stop."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler

from muster import outcome
from muster.attempt.attempt import Attempt, open_checkpoints
from muster.attempt.best import best_of, change_of_search, known_best, value_of
from muster.attempt.intervals import Every, Intervals
from muster.attempt.lifecycle import Ending
from muster.attempt.records import open_records, report
from muster.attempt.running_means import RunningMeans
from muster.checkpoint.commit import Saved
from muster.checkpoint.schemas import direction
from muster.checkpoint.tensor_versions import Changes, Place, place
from muster.checkpoint.trained import own_prefix, plain
from muster.checkpoint.weights import write_weights
from muster.data.fingerprint import fingerprint, hash_of, look, note_of
from muster.data.generators import drawn_from, key_of, seed_generators, state_of_generators
from muster.errors import ConfigError, DataError, Diverged, MusterError, Preempted, RankLost, final, say
from muster.files import replace_file
from muster.job import built_options
from muster.job.batch_source import BatchSource, LoaderSource, is_undivided, moved_on, parts_of, read_now, with_length
from muster.job.bootstrap import Bootstrap, end_alike
from muster.job.carried_state import BEST, COUNT, STATE, carried
from muster.job.options import JobOptions, as_yaml, loggers_of, own_before, own_of, run_options_of
from muster.job.own_objects import OwnDraws, OwnNumbers, OwnTensors
from muster.job.replicas import TOLERANCE, check_replicas, hooks_with_state
from muster.job.tracked_state import Tracked
from muster.job.trainee import JobTrainee, Reached, seed_step
from muster.loggers.metrics import Metrics
from muster.recovery.survival import WHY_NOT
from muster.timing.clock import Clock
from muster.world import external_group
from muster.world.counts import OF
from muster.world.counts import means as averages

BUILD_ALIKE = (
    "build modules in the `with` block, where all ranks have the same seed, or wrap them in DistributedDataParallel "
    "before track()"
)
STEP_ALIKE = "a checkpoint has the state of one rank: keep it alike on all ranks, or shard the model by fully_shard, and its optimizer with it"
UNTRACKED = "{name} steps the model and is not tracked: a resume, or the death of a rank, would begin its state anew; name it: track(model=..., optimizer=...)"
UNSCHEDULED = (
    "{kind}, the schedule of {name}, is not tracked: a resume, or the death of a rank, would begin it anew; name it: track(schedule=...), also if your "
    "code sets it from job.steps_done"
)
NO_OPTIMIZER = (
    "no optimizer is tracked: what the loop itself keeps for its updates, such as a rate in a variable, is in no checkpoint, and a resume, or the "
    "death of a rank, begins it anew; follow it from job.steps_done, or track an object that holds it"
)
DRAWN = (
    "before the job, random numbers were drawn from another state of {names} than in the attempt before: what is made of them, but for tracked "
    "weights, is not the same; begin with a seed (torch.manual_seed(0), np.random.seed(0)), or draw them in the function that the job calls"
)
SEEDED = (
    "torch.manual_seed({own}) before the job does not seed it: the order of samples and all that is drawn in the job follow from its seed={seed}; "
    "give Job(seed={own})"
)
CARRIED = "{name} {verb} from batch to batch in a variable of the loop ({line}), which is in no checkpoint: a resume, or the death of a rank, begins it anew"
REMEDIES = {
    STATE: ", and other weights may follow; keep it in a buffer of a tracked module, if training reads it",
    COUNT: "; give it to job.step(name=value) or job.log, whose means go on, or follow it from job.steps_done",
    BEST: "; let job.evaluate(..., best=name) choose, and read job.best, or follow it from job.steps_done",
}
FORGOTTEN = (
    "{name} is changed by the loop and is not tracked: a resume, or the death of a rank, would begin it anew; name it: track({short}={name}), which "
    "takes a module, or any object with state_dict() and load_state_dict(), unless a tracked object saves it or each step sets it anew"
)
OWN_NUMBERS = (
    "{names} {verb} changed by the loop and in no checkpoint: a resume, or the death of a rank, begins {them} anew; track an object that has such "
    "numbers in its state_dict(), let job.evaluate(..., best=name) choose the best, or follow them from job.steps_done"
)
MODE = (
    "{name} is trained in evaluation mode at step {step}, and was in training mode before, so dropout and batch norm work otherwise: call train() "
    "after an evaluation of your own; job.evaluate does so"
)
NAMED = 4
SWAPPED = (
    "the body of step {step} has changed the model since evaluate(best=...), as code that puts an average's weights in for it and takes them out again: "
    "the checkpoint that is kept has the weights of now; evaluate a module of its own that is tracked, as an EMA"
)
BEYOND = "the run is at step {step}, and batches() ends with step {steps}: nothing is trained, and model.pt has the weights of step {step}"
OWN_CHANGED = "values of own= have changed since {path} was written: {values}"
OWN_GENERATOR = (
    "the loop draws from {name}, which no checkpoint has: a resume, or the death of a rank, begins it anew, unless your code seeds it from "
    "job.steps_done; draw from the global generators of Python, NumPy or torch, which are saved"
)
OWN_LOADER = (
    "the loop reads a DataLoader by itself: after a resume, or the death of a rank, it begins with the loader's first batch again, unless your code goes "
    "on from job.steps_done{more}; give the loader to job.batches(), which goes on with the next batch"
)
SAME_ORDER = (
    "the loop's DistributedSampler has the same epoch as an epoch ago, so the samples come in the same order: call sampler.set_epoch(epoch), or give "
    "the loader to job.batches(), which does"
)
UNDIVIDED = ", and its {sampler} does not divide the samples among the ranks"
BUFFERS = (
    "{name} was another on each of the {before} ranks that saved it, and here are {now}: all go on with rank 0's, so what follows from it is not as "
    "in an undisturbed run; resume with {before} ranks if it holds samples of each rank"
)
LOOKS = OWN_LOOKS = 100
EVALUATED = 8
SAME = 0.05
"""A relative difference of what is measured twice at a step: a GPU may turn a sample."""
BEST_KEY, MODES = "evaluate(): best", ("auto", "min", "max")
BODY_S = 10.0
"""How long an evaluation in a loop's body goes on after the ranks agreed to stop; launchers kill after 30 s."""
GONE_S = 2.0
"""How long ranks that got no step() for a batch look for the death of another."""
SILENT_S = 1.0
POLL_S = 0.05
FROZEN = (
    "{name} was thawed before the state was saved that this attempt goes on from, and is frozen here, so it is trained no further: "
    "thaw it after track() where job.steps_done says that it was"
)
HOOK = (
    "the communication hook {name} has a state that no checkpoint holds: a resume begins it anew, and ends with other weights; track an object "
    "whose state_dict() and load_state_dict() are that state's, or register the hook without one"
)
WHOLE = (
    "the loader's {sampler} does not divide the samples: each of {ranks} ranks would train on the same ones; write {line}, or give the loader "
    "sampler=DistributedSampler(dataset) (with num_replicas=1, rank=0 if the ranks share a model that needs the same samples)"
)
ALIKE = (
    "the first batch of the loader is the same on all {ranks} ranks: unless this is meant, let each rank's sampler or stream have its own share "
    "of the samples, by job.rank and job.world_size, or give batches() the data set itself"
)
RATES = (
    "{name} is {first} on rank 0 and {own} on rank {rank}, so the ranks train by other rules: step a schedule such as ReduceLROnPlateau with "
    "what all ranks have, as job.sum(loss) / job.world_size or a value of job.evaluate"
)
SINCE = ", or at one since the `train` record before (log_every=1 names the step)"
TRAIN_ALIKE = (
    "wrap the model in DistributedDataParallel, or average gradients over the ranks before optimizer.step(); ranks that train apart for some steps "
    "do so in a `with` block in place of run(), and average before each save"
)


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
        seed_generators(key_of(options.seed, self.world.rank, self.reached.step), on_device=True)
        self.owes_save = self._is_asked_to_save = False
        """True between the end of a step after which a checkpoint is due, and its beginning."""
        self.is_within = False
        """True between the count of a step and the end of the loop's body, as the iterator of the batches sees it."""
        self.is_closed = self.has_left = False
        """True once that iterator is closed before its end, by `break` or by an error; and once it was by `break`."""
        self.is_told_to_stop = False
        """True once the loop has read that it should stop, so that leaving it is not its end."""
        self._is_other_length = False
        """True on rank 0 if a checkpoint of another number of ranks has a schedule for another number of steps."""
        self._has_seen_batch = False
        self.best: dict[str, Any] | None = None
        """The best evaluation so far (attempt/best.py)."""
        self._search: tuple[tuple[str, str], int, str, float] | None = None
        """By which metric and direction this attempt has last chosen it; at which step, on which data, and the value."""
        self._chosen: list[Place] = []
        """The parameters as they were when an evaluation was the best."""
        self._chosen_on: tuple[Callable[[], Any], str] | None = None
        """The data set of the last evaluation that has chosen, held weakly, and its fingerprint."""
        """Whether the last evaluation has drawn random numbers."""
        self._evaluated: list[Callable[[], Any]] = []
        """The data sets of the first evaluations, held weakly."""
        self._stepped = set[int]()
        """The optimizers that have made a step, tracked or not."""
        self._latest = 0.0
        self._has_looked = False
        self._own_draws, self._own_numbers, self._own_tensors = OwnDraws(), OwnNumbers(), OwnTensors()
        self._own_sampler: tuple[ref[DistributedSampler[Any]], int, int] | None = None
        """The sampler of the loop's own loader, its epoch after the first step, and a step of the next one."""
        self._looks_at_own = OWN_LOOKS
        """The steps in which they are still looked at; numbers are later, too, before each checkpoint."""
        self._has_trained = set[str]()
        """The modules that were in training mode at a step."""
        self._looks = 0 if tracked.optimizers or tracked.others else LOOKS
        """The steps after which a loop without an optimizer is still asked whether it trains."""
        self._at_first = Changes(tracked.named.items() if self._looks else ())
        if (
            self.world.again
        ):  # of a pass that a death has cut short, if the modules outlive the function that trains them
            for parameter in tracked.parameters():
                parameter.grad = None
        self.trainee = JobTrainee(self, bootstrap.kept)
        self._here, self.loaded_instead = built_options.options_of(tracked), ""
        self.built = self._built()
        self.unfinished = self._unfinished()
        self.start.restore(self.trainee)
        self._seed_step()
        self._generators = state_of_generators()
        writes = partial(report, self.folder.path) if self.world.is_first else None
        bootstrap.life.restored(self.reached, report=writes)
        self.peers = bootstrap.life.run()

    def refuse_unequal(self) -> None:
        """Raise ConfigError if the ranks' parameters differ. Collective."""
        check_replicas(self.tracked.named, self.world, tolerance=0.0, what="the parameter", remedy=BUILD_ALIKE)

    def refuse_others(self, saved: Saved) -> None:
        """Raise ConfigError if a checkpoint is of other tracked objects. Collective."""
        self._refuse("tracked", self.tracked.names, "track the same names")
        self._refuse_built(saved)
        self._refuse_of_ranks(saved)

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
            self._refuse_draws()
            self._refuse_moved_on(batch_source)
            facts, known = batch_source.facts, {"samples_per_epoch": batch_source.samples_per_epoch or None}
            self._refuse_data(facts)
            self._refuse_length()
            self._refuse_whole(batch_source)
        own, before = own_of(self.options), own_before(self.options)
        changed = [name for name in own.keys() & before.keys() if str(own[name]) != str(before[name])]
        self._own_changed = [f"{name}={before[name]} is now {own[name]}" for name in sorted(changed)]
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
        notes = self._notes(facts.get("fingerprint", ""))
        self.is_open = True
        self.start.tell(running, notes, save=self.save, total_steps=self.total_steps, **known)
        self._see_optimizers()
        self._at_first.look()
        self.bootstrap.kept.follow(self.trainee, self.folder)
        running.start()

    def _notes(self, fingerprint: str) -> Iterator[str]:
        if text := note_of(fingerprint):
            yield text
        if self._own_changed and (saved := self.start.saved):
            yield OWN_CHANGED.format(values=", ".join(self._own_changed), path=saved.path)
        if self.batch_source and self.reached.step > self.total_steps:
            yield BEYOND.format(step=self.reached.step, steps=self.total_steps)
        for name, state in hooks_with_state(self.tracked.modules.values()) if self.world.size > 1 else ():
            if not self.tracked.holds(state):
                yield HOOK.format(name=name)
        if self.loaded_instead:
            yield self.loaded_instead
        saved, now = self.start.saved, self.world.size
        if (
            saved
            and (before := saved.manifest["world_size"]) != now
            and (name := self.tracked.buffer_of_rank_0(saved.index()["tensors"]))
        ):
            yield BUFFERS.format(name=name, before=before, now=now)
        drawn, of_before = self.bootstrap.kept.drawn or {}, saved.manifest.get("drawn") if saved else None
        if isinstance(of_before, dict):  # a number, of torch alone, until 2026-11-29
            names = [f"{name}'s generator" for name in sorted(drawn) if of_before.get(name, drawn[name]) != drawn[name]]
            if names:
                yield DRAWN.format(names=" and ".join(names))
        seed, own = self.options.seed, self.bootstrap.kept.seeded
        if own is not None and own != seed:
            yield SEEDED.format(own=own, seed=seed)
        if self.world.is_borrowed and (text := external_group.why_restart_may_hang()):
            yield text
        if why := self.bootstrap.why_no_survival:
            yield WHY_NOT.format(key=self.trainee.key, why=why)

    def _see_optimizers(self) -> None:
        """Note an untracked optimizer that steps tracked parameters: a resume begins it anew, and no death is survived.

        So would an untracked schedule. Both are refused in a run that begins, if no tracked object may hold them unseen.
        """
        seen, trained = self._stepped, {id(each) for each in self.tracked.parameters()}
        untracked = dict[int, tuple[ref[Optimizer], int]]()

        def look(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) in seen:
                if (first := untracked.get(id(optimizer))) and first[0]() is optimizer and self.reached.step > first[1]:
                    raise ConfigError(UNTRACKED.format(name=type(optimizer).__name__))
                return
            seen.add(id(optimizer))
            stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
            if not trained & stepped:
                return
            name = type(optimizer).__name__
            knows_all = all(isinstance(each, LRScheduler) for each in self.tracked.others.values())
            is_certain = knows_all and self.begins
            if not self.tracked.saves(optimizer):
                if (
                    is_certain and optimizer.state
                ):  # refused in another step: one that is made in each begins anew anyway
                    untracked[id(optimizer)] = ref(optimizer), self.reached.step
                    return
                self.tell_once(f"untracked {name}", UNTRACKED.format(name=name))
                self.trainee.refuse(f"{name} is not tracked")
            found = self.tracked.untracked_schedules(optimizer)
            if found and is_certain:
                found.clear()
                gc.collect()  # one that was replaced may be in a cycle of references
                found = self.tracked.untracked_schedules(optimizer)
            for each in found:
                kind = type(each).__name__
                text = UNSCHEDULED.format(kind=kind, name=name)
                if is_certain:
                    raise ConfigError(text)
                self.tell_once(f"untracked {kind}", text)

        handle = register_optimizer_step_post_hook(look)
        self.bootstrap.life.on_end(handle.remove, failed=handle.remove, parted=handle.remove)

    def _note_untracked(self) -> None:
        """Note that a loop without an optimizer trains by a rule of its own."""
        if not self._stepped and (self._at_first.changed() or self._at_first.changed_unseen()):
            self._looks = 0
            self.tell_once("no optimizer", NO_OPTIMIZER)

    def _run(self, records: Metrics, facts: dict[str, Any]) -> Attempt:
        saved = {
            "tracked": self.tracked.names,
            "built": self.built,
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
        running.checkpoints.best = self.best
        return running

    def note(self, values: Mapping[str, Any], *, weight: float) -> None:
        """Add means over `weight` samples of this rank to those of the next record."""
        if weight:
            for name, value in values.items():
                self.means.add({name: value}, times=weight)
                self.means.add({f"{name}{OF}": weight})

    def advance(self, *, samples: int) -> None:
        """Count a step of `samples` samples of all ranks, and log if it is time to. Collective."""
        self.tracked.accumulation.count()
        self.is_within = True
        self.reached.step += 1
        self.reached.samples += samples
        self.running.records.advance(self.reached.step)
        self._see_modes()
        if self.is_time_to_log():
            self.log()

    def is_time_to_log(self) -> bool:
        return self.is_over or self.intervals.is_due("line", self.reached)

    def end_step(self) -> None:
        """Save at the interval, after the body of the loop has ended. Collective."""
        is_due = self.intervals.is_due("save", self.reached) and not self.is_over
        self.owes_save, self._is_asked_to_save = is_due or self._is_asked_to_save, False
        if self._looks:
            self._looks -= 1
            self._note_untracked()
        if not self._has_looked:
            self._has_looked = True
            self._look_once()
        self._look_at_own()
        if self._own_sampler and self.reached.step == self._own_sampler[2]:
            sampler = self._own_sampler[0]()
            if sampler is not None and sampler.epoch == self._own_sampler[1]:
                self.tell_once("set_epoch", SAME_ORDER)
        self.tracked.accumulation.end_step()
        self.trainee.end_step()
        self.is_within = False
        if self.owes_save:  # after the last step it is done at the end
            self.save()
            self.owes_save = False
        self._seed_step()

    def _look_once(self) -> None:
        """Note, after the first step, what the loop does that a checkpoint cannot know."""
        if self.world.is_first and (name := self.tracked.frozen_again()):
            self.running.records.event("note", text=FROZEN.format(name=name))
        found = defaultdict[tuple[str, str], list[str]](list)
        for name, line, kind in [*carried(sys._getframe(), {*map(id, self.tracked.parameters())})]:
            found[kind, str(line)].append(name)
        for (kind, where), names in found.items():
            verb, remedy = "goes" if len(names) == 1 else "go", REMEDIES[kind]
            text = CARRIED.format(name=", ".join(names), verb=verb, line=where)
            self.tell_once(f"carried {', '.join(names)}", text + remedy)
        is_tracked = any(hasattr(each, "__iter__") for each in self.tracked.others.values())
        if self.batch_source is None and not is_tracked and (batches := read_now()) is not None:
            apart = self.world.size > 1 and is_undivided(batches)
            more = UNDIVIDED.format(sampler=type(batches.sampler).__name__) if apart else ""
            self.tell_once("own loader", OWN_LOADER.format(more=more))
            if isinstance(batches.sampler, DistributedSampler) and batches.sampler.shuffle:
                self._own_sampler = ref(batches.sampler), batches.sampler.epoch, self.reached.step + len(batches)

    def _look_at_own(self) -> None:
        """Note what the step has changed in objects of the script's own that are not tracked."""
        if self._looks_at_own < 0 and not self.owes_save:
            return
        step = self.reached.step
        if drawn := self._own_draws.drawn(sys._getframe()):
            self.tell_once("own generator", OWN_GENERATOR.format(name=drawn))
        for name in self._own_tensors.changed() or ():
            text = FORGOTTEN.format(name=name, short=name.rpartition(".")[2])
            self.tell_once(f"own {name}", text)
        known = {step, step - 1, self.epoch, self.epoch + 1}
        found = self._own_numbers.changed(sys._getframe(), self._apart, known=known)
        if found:
            names = [*found[:NAMED], *(["..."] if found[NAMED:] else [])]
            verb, them = ("is", "it") if len(found) == 1 else ("are", "them")
            self.tell_once(f"own {found[0]}", OWN_NUMBERS.format(names=", ".join(names), verb=verb, them=them))

    def _apart(self) -> set[int]:
        """The ids of objects whose numbers a checkpoint has, or this job sets."""
        optimizers = self.tracked.optimizers.values()
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        saved = (*self.tracked.others.values(), *optimizers, *groups)
        return {*map(id, saved), *map(id, parts_of(self.batch_source.source) if self.batch_source else ())}

    def _see_modes(self) -> None:
        """Note a model that is trained in evaluation mode, and was in training mode before."""
        for name, module in self.tracked.modules.items():
            if module.training:
                self._has_trained.add(name)
            elif name in self._has_trained and self.tracked.trains(module):
                self._has_trained.remove(name)
                self.tell_once(f"mode of {name}", MODE.format(name=name, step=self.reached.step))

    def _seed_step(self) -> None:
        if self.bootstrap.seeds_steps:
            seed_step(self.options.seed, self.world, self.reached.step)

    def begin_step(self) -> None:
        """Begin the next step, unless the ranks have agreed to stop before it. Collective. Raises AgreedStop."""
        self.bootstrap.kept.has_worked = True
        if not self.running.begin("step"):
            self.stop()
        self._looks_at_own -= 1
        if self._looks_at_own == OWN_LOOKS - 1:
            self._own_numbers.begin(sys._getframe(), self._apart)
        if self._looks_at_own >= 0:
            known = {id(each) for each in (*self.tracked.parameters(), *self.tracked.buffers().values())}
            self._own_draws.begin(sys._getframe())
            self._own_tensors.begin(sys._getframe(), known, self.tracked.holds)
        elif self._looks_at_own == -1:
            self._own_draws, self._own_tensors = OwnDraws(), OwnTensors()  # which hold some no longer

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

    def ask_to_save(self) -> None:
        """Save this step: now, or once the loop's body has ended. Collective."""
        if self._owes_body:  # a resume would go on with the next batch, and never do the rest of the body
            self._is_asked_to_save = True
        else:
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
        """Save if the loop has asked for it in a body that it then left; return whether it has. Collective."""
        is_asked, self._is_asked_to_save = self._is_asked_to_save, False
        if is_asked:
            self.save()
        return is_asked

    def save(self) -> None:
        """Start to write a checkpoint of this step. Collective. Raises Diverged, StorageError."""
        if not self.tracked.is_finite():
            raise self._diverged("a weight is")
        if self.best and self.best["step"] == self.reached.step and self._chosen:
            if self._chosen != [*map(place, self.tracked.parameters())]:
                self.tell_once("swapped", SWAPPED.format(step=self.reached.step))
            self._chosen = []
        self.refuse_apart()
        self._refuse_rates()
        self.running.save(self.trainee.state, self.position())

    @property
    def begins(self) -> bool:
        """True if no attempt before has made a step that this one goes on from."""
        return self.start.saved is None and not self.world.again

    def refuse_apart(self) -> None:
        """Raise ConfigError if parameters or optimizers' states differ between ranks by more than rounding. Collective."""
        check_replicas(self.tracked.named, self.world, tolerance=TOLERANCE, what="the parameter", remedy=TRAIN_ALIKE)
        state = self.tracked.of_optimizers()  # whose parts come with a layer that is thawed
        check_replicas(state, self.world, tolerance=TOLERANCE, what="the optimizer's", remedy=STEP_ALIKE)

    def position(self) -> dict[str, Any]:
        """Return the progress for a checkpoint's manifest."""
        left = {"left": True} if self.has_left and not (self.is_told_to_stop or self.is_over) else {}
        return {"epoch": self.epoch, "samples": self.reached.samples, "best": self.best, **left}

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

        A step whose body has not ended is not saved: the resumed run repeats it from the checkpoint before.
        """
        if not self._owes_body:
            self.save()
        raise AgreedStop(self.running.stopped(is_saved=not self._owes_body))

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

    def _refuse_data(self, facts: Mapping[str, Any]) -> None:
        fixed = ", ".join(f"{name}={value}" for name, value in facts.items())
        self.world.same("batches()", fixed, remedy="give every rank the same arguments and data", error=ConfigError)
        for name, value in facts.items():
            remedy = "restore the data" if name == "fingerprint" else f"give batches() the {name} of before"
            self._refuse(name, value, remedy, within="batches")

    def _refuse_whole(self, batch_source: BatchSource) -> None:
        """Raise ConfigError for a loader that gives all ranks the same samples. A data set of each rank's own is divided already."""
        if self.world.size == 1 or not isinstance(batch_source, LoaderSource):
            return
        found = self.world.gather([batch_source.is_whole, batch_source.fingerprint() if batch_source.is_whole else ""])
        is_alike = batch_source.is_whole and all(each == found[0] for each in found)
        told = (
            {"sampler": batch_source.sampler, "ranks": self.world.size, "line": batch_source.line(self.world.size)}
            if is_alike
            else {}
        )
        self.world.together(ConfigError(WHOLE.format(**told)) if told else None)

    def _refuse_moved_on(self, batch_source: BatchSource) -> None:
        """Raise RankLost if a source that this process has read since an earlier attempt keeps a position of its own."""
        kinds = self.world.gather(moved_on(batch_source.source) if self.bootstrap.kept.survival else "")
        rank = next((rank for rank, kind in enumerate(kinds) if kind), None)
        if rank is not None:
            kind = kinds[rank]
            raise RankLost(
                f"{kind} was built before run() and has moved on on rank {rank}, which a rank that is restarted in place has not: all ranks "
                f"restart; build it in the function that run() calls",
                rank=rank,
            )

    def refuse_other_samples(self, dataset: Any) -> None:
        """Raise DataError unless all ranks evaluate on the same samples, as far as some of them show. Collective."""
        is_new = len(self._evaluated) < EVALUATED and not any(each() is dataset for each in self._evaluated)
        if self.world.size == 1 or self.world.lowest(is_new) is None:
            return
        self.peers.heartbeat.enter("evaluation", self.reached.step)
        self._evaluated.append(_weakly(dataset))
        remedy = (
            "give all ranks the same samples, in the same order; the first and the last one are compared, without texts"
        )
        seen = fingerprint(with_length(dataset, "evaluate"), most=2, texts=False)
        self.world.same("evaluate(): the data set", seen, remedy=remedy)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do not journal the modules' buffers as this rank's own in this context: an evaluation uses rank 0's."""
        self.is_evaluating, are_own = True, not (self.is_within and self.trainee.are_changed())
        try:
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
        value = value_of(metric, values, key=BEST_KEY)
        if mode not in MODES:
            raise ConfigError(f"evaluate(best_mode={mode!r}): give {', '.join(MODES[:-1])} or {MODES[-1]}")
        if not (mode := direction(metric) if mode == "auto" else mode):
            raise ConfigError(
                f"{BEST_KEY}={metric}: its name does not say whether less or more of it is better: write best_mode='min', or 'max'"
            )
        step, data = self.reached.step, self._fingerprint(dataset)
        is_first = self._search is None
        self._refuse_second_choice((metric, mode), data, value)
        if not step or self.is_untrained:
            return
        of_data = (
            data if is_first else ""
        )  # data that are others each time, as rollouts, are compared within an attempt
        if text := change_of_search(self.best, metric, mode, key=BEST_KEY, step=step, data=of_data):
            self.running.records.event("note", text=text)
            self.best = None
        self.best = best_of(self.best, value, self.running.checkpoints, metric=metric, mode=mode, step=step, data=data)
        if self.best["step"] == step:
            self._chosen = [*map(place, self.tracked.parameters())]
            self.ask_to_save()

    def _fingerprint(self, dataset: Any) -> str:
        """Return rank 0's fingerprint of an evaluation's data set, looked at once. Collective."""
        is_same = self._chosen_on is not None and self._chosen_on[0]() is dataset
        if self.world.lowest(not is_same) is not None or self._chosen_on is None:
            self.peers.heartbeat.enter("evaluation", self.reached.step)
            data = self.world.on_first(lambda: fingerprint(with_length(dataset, "evaluate"), texts=False))
            self._chosen_on = _weakly(dataset), data
            self.peers.heartbeat.enter("step", self.reached.step)
        return self._chosen_on[1]

    def _refuse_second_choice(self, search: tuple[str, str], data: str, value: float) -> None:
        """Raise ConfigError if this attempt chooses by another metric, too, or by other data or another value at this step."""
        now = search, self.reached.step, data, value
        (before, step, of, other), self._search = self._search or now, now
        only = "one evaluation of a job chooses the best: give best= to one, and names of their own to the values of others"
        if search != before:
            raise ConfigError(
                f"{BEST_KEY} chooses by {search[0]} ({search[1]}), and has chosen by {before[0]} ({before[1]}): {only}"
            )
        is_same = math.isclose(value, other, rel_tol=SAME) or (math.isnan(value) and math.isnan(other))
        if step == self.reached.step and not (is_same and data == of):
            raise ConfigError(f"{BEST_KEY}={search[0]} is {other:.6g} and then {value:.6g} at step {step}: {only}")

    def see_batch(self, batch: Any) -> None:
        """Record a note if the first batch of the loop's own loader is the same on all ranks. Collective."""
        if self._has_seen_batch or self.world.size == 1 or not isinstance(self.batch_source, LoaderSource):
            return
        self._has_seen_batch, digests = True, self.world.gather(hash_of(look(batch)))
        if len({*digests}) == 1:
            self.tell_once("alike", ALIKE.format(ranks=self.world.size))

    def tell_once(self, what: str, text: str) -> None:
        """Record a note, unless an earlier attempt, which a rank's death has ended, has recorded it."""
        if what not in self.bootstrap.kept.told:
            self.bootstrap.kept.told.add(what)
            self.running.records.event("note", text=text)

    def _built(self) -> dict[str, Any]:
        """Return the options with which the run has begun; empty if they are not known."""
        if self.start.saved:
            return self.start.saved.manifest.get("built") or {}
        kept = self.bootstrap.kept
        kept.built = kept.built or self._here
        return kept.built

    def _refuse_built(self, saved: Saved) -> None:
        """Raise ConfigError for an optimizer or a schedule with other options than before.

        At another world size, from which they may follow, it is noted, unless a value of the script's own has changed alike.
        """
        changed, failure = [*built_options.differences(self.built, self._here)], None
        if changed and self.world.is_first and not self.world.again:
            text = built_options.told(saved.path, changed)
            before, now = own_before(self.options), own_of(self.options)
            ranks = saved.manifest["world_size"], self.world.size
            is_given = any(built_options.is_changed_alike(before, now, each, ranks=ranks) for each in changed)
            if is_given or ranks[0] == ranks[1]:
                later = (
                    ""
                    if built_options.is_scheduled(self.tracked)
                    else ", and set another one after track(), in every attempt"
                )
                failure = ConfigError(f"{text}: build it as before{later}; or use another folder")
            else:  # perhaps it follows from the number of ranks
                self.loaded_instead = text
            self._is_other_length = any(built_options.is_length(self.tracked, each) for each in changed)
        self.world.together(failure)

    def _refuse_of_ranks(self, saved: Saved) -> None:
        """Raise ConfigError for a rank's own state beside parameters and buffers, saved at another world size."""
        others = {name for name in saved.index()["tensors"] if name.startswith(own_prefix(1))}
        extra = next((name for name in self.tracked.beside if f"{own_prefix(1)}{name}" in others), "")
        if extra and saved.manifest["world_size"] != self.world.size:
            raise ConfigError(
                f"{saved.path} has a state {extra} of each of its {saved.manifest['world_size']} ranks, such as a metric's sums, and here are "
                f"{self.world.size}: resume with as many, or reset it and leave it out of track()"
            )

    def _refuse_rates(self) -> None:
        """Raise ConfigError if the ranks' optimizers differ in options, as after a schedule that follows a rank's own loss."""
        own, failure = self.tracked.rates(), None
        first: dict[str, float] = self.world.broadcast(own)
        if apart := [name for name in own.keys() & first.keys() if repr(own[name]) != repr(first[name])]:
            name, rank = min(apart), self.world.rank
            failure = ConfigError(RATES.format(name=name, first=f"{first[name]:g}", own=f"{own[name]:g}", rank=rank))
        self.world.together(failure)

    def _refuse_length(self) -> None:
        """Raise ConfigError if both a schedule and the run have another length: that does not follow from the number of ranks."""
        saved, failure = self.start.saved, None
        if self._is_other_length and saved and saved.manifest.get("total_steps") != self.total_steps:
            lengths = f"total_steps={saved.manifest.get('total_steps')}, and this is total_steps={self.total_steps}"
            failure = ConfigError(f"{self.loaded_instead} ({lengths}): build it as before; or use another folder")
        self.world.together(failure)

    def _refuse_draws(self) -> None:
        """Raise ConfigError if the script has drawn random numbers since `track`: a resumed attempt would draw others."""
        failure = ConfigError(
            "random numbers were drawn between track() and batches(), where a resume draws others: draw them before "
            "track(), or from a generator of their own"
        )
        self.world.together(failure if drawn_from(self._generators) else None)

    def _refuse(self, name: str, value: Any, remedy: str, *, within: str | None = None) -> None:
        """Raise ConfigError or DataError unless the checkpoint has this value, or none."""
        saved = self.start.saved
        manifest = saved.manifest if saved else {}
        before = (manifest.get(within) or {}).get(name) if within else manifest.get(name)
        if before is not None and before != value and saved:
            kind = DataError if name == "fingerprint" else ConfigError
            raise kind(
                f"{saved.path} was written with {name}={_listed(before)}, and this is {name}={_listed(value)}: {remedy}, or "
                "use another folder"
            )


def _listed(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _weakly(thing: Any) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # a list, for example
        return lambda: thing
