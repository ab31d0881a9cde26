"""What the ranks must agree on, and an attempt with the checkpoint that it goes on from: tracked objects, options, batches, weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import LBFGS
from torch.optim.lr_scheduler import LRScheduler

from muster.checkpoint.commit import Saved
from muster.checkpoint.trained import own_prefix
from muster.data.fingerprint import note_of
from muster.data.generators import drawn_from, seeded_by_script, state_of_generators
from muster.errors import ConfigError, DataError, RankLost
from muster.job import built_options
from muster.job.batch_source import BatchSource, LoaderSource, moved_on
from muster.job.bootstrap import Bootstrap
from muster.job.held_objects import holds
from muster.job.options import own_before, own_of
from muster.job.replicas import TOLERANCE, check_replicas, hooks_with_state
from muster.job.tracked_state import Tracked
from muster.job.trainee import JobTrainee
from muster.recovery.survival import WHY_NOT
from muster.world import external_group

BUILD_ALIKE = (
    "build modules in the `with` block, where all ranks have the same seed, or wrap them in DistributedDataParallel "
    "before track()"
)
STEP_ALIKE = "a checkpoint has the state of one rank: keep it alike on all ranks, or shard the model by fully_shard, and its optimizer with it"
TRAIN_ALIKE = (
    "wrap the model in DistributedDataParallel, or average gradients over the ranks before optimizer.step(); ranks that train apart for some steps "
    "do so in a `with` block in place of run(), and average before each save"
)
SORTED = ", in the same order: sort what os.listdir() or glob() returns"
UNAVERAGED = (
    "its DistributedDataParallel has not averaged its gradient; a parameter that no loss reaches keeps it from that (freeze it by requires_grad_(False), "
    "or give find_unused_parameters=True), and so do no_sync() and a call of model.module"
)
DRAWN = (
    "before the job, random numbers were drawn from another state of {names} than in the attempt before: what is made of them, but for tracked "
    "weights, is not the same; begin with a seed (torch.manual_seed(0), np.random.seed(0)), or draw them in the function that the job calls"
)
SEEDED = (
    "torch.manual_seed({own}) before the loop does not seed it: the order of samples and all that is drawn in the loop follow from the job's "
    "seed={seed}; give Job(seed={own}), the same number in every attempt and on every rank"
)
BEYOND = "the run is at step {step}, and batches() ends with step {steps}: nothing is trained, and model.pt has the weights of step {step}"
OWN_CHANGED = "values of own= have changed since {path} was written: {values}"
OTHER_LAYERS = "{name} was built with {before} before, and with {here} in place of that now: its weights fit, and the run goes on with them"
RECIPE = "docs/loop-recipes.md, Another learning rate"
RESET = "{name} was {before} when track() had restored it, and is {now}: set after track() beside a schedule, it undoes the schedule's steps in every attempt; {remedy}"
ONCE = f"change it once, together with the schedule's base_lrs, which a checkpoint holds ({RECIPE})"
ONE_SAMPLE = (
    "an epoch's last batch, of size {count}, leaves a rank one sample at most ({ranks}), and {layer} needs two unless each has several values of a "
    "channel: without them the run ends there; give batches(drop_last=True), or choose another batch_size or number of ranks"
)
BUFFERS = (
    "{name} was another on each of the {before} ranks that saved it, and here are {now}: all go on with rank 0's, so what follows from it is not as "
    "in an undisturbed run; resume with {before} ranks if it holds samples of each rank"
)
CLOSURE = (
    "{name} is an LBFGS, which calls its closure as often as the loss says that it returns: unless that is the same on all ranks, they wait for each other "
    "for ever; call (loss * job.weight).backward() in it, and return job.sum(loss.item() * job.weight) / job.world_size"
)
HOOK = (
    "the communication hook {name} has a state that no checkpoint holds: a resume begins it anew, and ends with other weights; track an object "
    "whose state_dict() and load_state_dict() are that state's, or register the hook without one"
)
WHOLE = (
    "the loader's {sampler} does not divide the samples: each of {ranks} ranks would train on the same ones; write {line}, whose batch_size is that of all ranks "
    "together, or give the loader sampler=DistributedSampler(dataset) (with num_replicas=1, rank=0 if the ranks share a model that needs the same samples)"
)
RATES = (
    "{name} is {first} on rank 0 and {own} on rank {rank}, so the ranks train by other rules: step a schedule such as ReduceLROnPlateau with "
    "what all ranks have, as job.sum(loss) / job.world_size or a value of job.evaluate"
)


class Consistency:
    """Compares ranks with each other, and this attempt with the checkpoint of an earlier one."""

    def __init__(self, bootstrap: Bootstrap, tracked: Tracked):
        self._options, self._tracked = bootstrap.options, tracked
        self._world, self._start, self._kept = bootstrap.world, bootstrap.start, bootstrap.kept
        self._is_other_length = False
        """True on rank 0 if a checkpoint of another number of ranks has a schedule for another number of steps."""
        self.own = own_of(self._options)
        """The script's own values."""
        self._own_before = own_before(self._options, self._start.saved.manifest if self._start.saved else {})
        self._here, self._loaded_instead = built_options.options_of(tracked), ""
        self.layers = built_options.layers_of(tracked)
        """The layers of torch's with which this attempt has built its modules."""
        self.built = self._built()
        """The options with which the run has begun; empty if they are not known."""
        inside = seeded_by_script()  # since the job has seeded all generators
        self._seeded = bootstrap.kept.seeded if inside is None else inside
        self._generators = dict[str, str]()
        self._rates, self._base_rates = dict[str, float](), dict[str, list[float]]()
        """As `track` has restored them, the latter of optimizers that a schedule sets; empty in a run that begins."""

    def begin(self) -> None:
        """Note the state of the random number generators: nothing may draw until the batches are asked for. Note the rates."""
        self._generators = state_of_generators()
        if self._start.saved or self._world.again:
            self._rates, self._base_rates = self._tracked.rates(), self._base_rates_now()

    def refuse_unequal(self) -> None:
        """Raise ConfigError if the ranks' parameters differ. Collective."""
        check_replicas(self._tracked.named, self._world, tolerance=0.0, what="the parameter", remedy=BUILD_ALIKE)

    def refuse_others(self, saved: Saved) -> None:
        """Raise ConfigError if a checkpoint is of other tracked objects. Collective."""
        self._refuse("tracked", self._tracked.names, "track the same names")
        self._refuse_built(saved)
        self._refuse_of_ranks(saved)

    def refuse_apart(self) -> None:
        """Raise ConfigError if parameters or optimizers' states differ between ranks by more than rounding. Collective."""
        remedy = UNAVERAGED if self._tracked.are_in_ddp else TRAIN_ALIKE
        check_replicas(self._tracked.named, self._world, tolerance=TOLERANCE, what="the parameter", remedy=remedy)
        state = self._tracked.of_optimizers()  # whose parts come with a layer that is thawed
        check_replicas(state, self._world, tolerance=TOLERANCE, what="the optimizer's", remedy=STEP_ALIKE)

    def refuse_batches(self, source: BatchSource) -> None:
        """Raise ConfigError, DataError or RankLost unless the batches can be trained on. Collective."""
        self._refuse_draws()
        self._refuse_moved_on(source)
        self._refuse_data(source)
        self._refuse_length(source.total_steps)
        self._refuse_whole(source)

    def notes(self, source: BatchSource | None, *, step: int, why_not: str) -> Iterator[str]:
        """Yield what an attempt that begins at `step` differs in, and what no checkpoint holds.

        why_not: why a rank that dies ends all ranks, although survive=True; empty if it is restarted in place.
        """
        if source and (text := note_of(source.facts.get("fingerprint", ""))):
            yield text
        saved, now = self._start.saved, self._world.size
        if saved and (values := self._own_changed()):
            yield OWN_CHANGED.format(values=values, path=saved.path)
        layers = (saved and saved.manifest.get("layers")) or {}  # none until 2026-11-30
        for name, before, here in built_options.other_layers(layers, self.layers):
            yield OTHER_LAYERS.format(name=name, before=before, here=here)
        if source and (text := self._reset()):
            yield text
        if source and (count := source.last_count) and (layer := self._tracked.needs_two()):
            ranks = f"{self._world.size} ranks" if self._world.size > 1 else "1 rank"
            yield ONE_SAMPLE.format(count=count, ranks=ranks, layer=layer)
        if source and step > source.total_steps:
            yield BEYOND.format(step=step, steps=source.total_steps)
        for name, each in self._tracked.optimizers.items():
            if isinstance(each, LBFGS) and now > 1:
                yield CLOSURE.format(name=name)
        for name, state in hooks_with_state(self._tracked.modules.values()) if self._world.size > 1 else ():
            if not holds(self._tracked, state):
                yield HOOK.format(name=name)
        if self._loaded_instead:
            yield self._loaded_instead
        if saved and (before := saved.manifest["world_size"]) != now:
            index = saved.index()
            if name := self._tracked.buffer_of_rank_0(index["tensors"]) or self._tracked.of_ranks(index["values"]):
                yield BUFFERS.format(name=name, before=before, now=now)
        drawn, of_before = self._kept.drawn or {}, saved.manifest.get("drawn") if saved else None
        if isinstance(of_before, dict):  # a number, of torch alone, until 2026-11-29
            names = [f"{name}'s generator" for name in sorted(drawn) if of_before.get(name, drawn[name]) != drawn[name]]
            if names:
                yield DRAWN.format(names=" and ".join(names))
        seed, own = self._options.seed, self._seeded
        if own is not None and own != seed:
            yield SEEDED.format(own=own, seed=seed)
        if self._world.is_borrowed and (text := external_group.why_restart_may_hang()):
            yield text
        if why_not:
            yield WHY_NOT.format(key=JobTrainee.key, why=why_not)

    @property
    def _elsewhere(self) -> str:
        """How to begin anew."""
        if self._options.resume in ("auto", "never"):
            return "use another folder"
        return "begin at step 0 from its weights, by muster.load(RUN, into=model) before track(), and without resume="

    def _scheduled(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield the name of each optimizer that a tracked schedule sets, and the schedule."""
        for name in self._tracked.optimizers:
            if schedule := built_options.schedule_of(self._tracked, name):
                yield name, schedule

    def _base_rates_now(self) -> dict[str, list[float]]:
        return {name: built_options.base_rates(schedule) for name, schedule in self._scheduled()}

    def _reset(self) -> str:
        """Return a line for the first rate that was set since `track` beside a schedule whose base rates are as before; empty without."""
        now, rates = self._base_rates_now(), self._tracked.rates()
        for name, schedule in self._scheduled():
            if self._base_rates.get(name) != now[name]:
                continue
            for place, before in self._rates.items():
                if place.startswith(f"{name}.") and place.endswith(".lr") and rates.get(place, before) != before:
                    remedy = (
                        ONCE if built_options.is_in_proportion(schedule) else f"leave it as it is, or {self._elsewhere}"
                    )
                    return RESET.format(name=place, before=f"{before:g}", now=f"{rates[place]:g}", remedy=remedy)
        return ""

    def _own_changed(self) -> str:
        """Return the values of the script's own that are not those of the attempt before, as `lr=0.1 is now 0.2`; empty without any."""
        names = sorted(self.own.keys() & self._own_before.keys())
        pairs = [(name, self._own_before[name], self.own[name]) for name in names]
        return ", ".join(f"{name}={before} is now {now}" for name, before, now in pairs if str(before) != str(now))

    def _refuse_data(self, source: BatchSource) -> None:
        facts, saved = source.facts, self._start.saved
        of_full_batches = source.samples_per_epoch // facts.get("batch_size", 1)
        first: dict[str, Any] = self._world.broadcast(facts)
        found = self._world.gather([name for name, value in facts.items() if first.get(name) != value])
        apart = {name for names in found for name in names}
        fixed = ", ".join(f"{name}={value}" for name, value in facts.items() if name in apart)
        remedy = f"give every rank the same arguments and data{SORTED if 'fingerprint' in apart else ''}"
        self._world.same("batches()", fixed, remedy=remedy, error=ConfigError)
        for name, value in facts.items():
            changed = f" (of own=, {values})" if (values := self._own_changed()) else ""
            remedies = {
                "fingerprint": f"restore the data, and what is made of them{changed}{SORTED}",
                "seed": "give Job(seed=...) the one of before",
            }
            if name == "drop_last" and saved and saved.step < of_full_batches:
                continue  # no smaller batch has been trained on yet, or dropped
            remedy = remedies.get(name, f"give batches() the {name} of before")
            self._refuse(name, value, remedy, within="batches")

    def _refuse_whole(self, batch_source: BatchSource) -> None:
        """Raise ConfigError for a loader that gives all ranks the same samples. A data set of each rank's own is divided already."""
        if self._world.size == 1 or not isinstance(batch_source, LoaderSource):
            return
        found = self._world.gather([batch_source.is_whole, batch_source.fingerprint() if batch_source.is_whole else ""])
        is_alike = batch_source.is_whole and all(each == found[0] for each in found)
        told = (
            {"sampler": batch_source.sampler, "ranks": self._world.size, "line": batch_source.line(self._world.size)}
            if is_alike
            else {}
        )
        self._world.together(ConfigError(WHOLE.format(**told)) if told else None)

    def _refuse_moved_on(self, batch_source: BatchSource) -> None:
        """Raise RankLost if a source that this process has read since an earlier attempt keeps a position of its own."""
        kinds = self._world.gather(moved_on(batch_source.source) if self._kept.survival else "")
        rank = next((rank for rank, kind in enumerate(kinds) if kind), None)
        if rank is not None:
            kind = kinds[rank]
            raise RankLost(
                f"{kind} was built before run() and has moved on on rank {rank}, which a rank that is restarted in place has not: all ranks "
                f"restart; build it in the function that run() calls",
                rank=rank,
            )

    def _built(self) -> dict[str, Any]:
        if self._start.saved:
            return self._start.saved.manifest.get("built") or {}
        kept = self._kept
        kept.built = kept.built or self._here
        return kept.built

    def _refuse_built(self, saved: Saved) -> None:
        """Raise ConfigError for an optimizer or a schedule with other options than before.

        At another world size, from which they may follow, it is noted, unless a value of the script's own has changed alike.
        """
        changed, failure = [*built_options.differences(self.built, self._here)], None
        if changed and self._world.is_first and not self._world.again:
            text = built_options.told(saved.path, changed)
            ranks = saved.manifest["world_size"], self._world.size
            own = self._own_before, self.own
            is_given = any(built_options.is_changed_alike(*own, each, ranks=ranks) for each in changed)
            if is_given or ranks[0] == ranks[1]:
                failure = ConfigError(f"{text}: build it as before{self._later(changed)}; or {self._elsewhere}")
            else:  # perhaps it follows from the number of ranks
                self._loaded_instead = text
            self._is_other_length = any(built_options.is_length(self._tracked, each) for each in changed)
        self._world.together(failure)

    def _later(self, changed: Iterable[tuple[str, Any, Any]]) -> str:
        """Return how a run that goes on may have other options, with a comma before it; empty if it may not."""
        scheduled, owners = dict(self._scheduled()), {name.partition(".")[0] for name, *_ in changed}
        if owners <= self._tracked.optimizers.keys() - scheduled.keys():
            return ", and set another one after track(), in every attempt"
        rated = [scheduled.get(name.partition(".")[0]) for name, *_ in changed if name.endswith(".lr")]
        is_told = rated and all(each and built_options.is_in_proportion(each) for each in rated)
        return f", and change the rate as in {RECIPE}" if is_told else ""

    def _refuse_of_ranks(self, saved: Saved) -> None:
        """Raise ConfigError for a rank's own state beside parameters and buffers, saved at another world size."""
        others = {name for name in saved.index()["tensors"] if name.startswith(own_prefix(1))}
        extra = next((name for name in self._tracked.beside if f"{own_prefix(1)}{name}" in others), "")
        if extra and saved.manifest["world_size"] != self._world.size:
            raise ConfigError(
                f"{saved.path} has a state {extra} of each of its {saved.manifest['world_size']} ranks, such as a metric's sums, and here are "
                f"{self._world.size}: resume with as many, or reset it and leave it out of track()"
            )

    def refuse_rates(self) -> None:
        """Raise ConfigError if the ranks' optimizers differ in options, as after a schedule that follows a rank's own loss."""
        own, failure = self._tracked.rates(), None
        first: dict[str, float] = self._world.broadcast(own)
        if apart := [name for name in own.keys() & first.keys() if repr(own[name]) != repr(first[name])]:
            name, rank = min(apart), self._world.rank
            failure = ConfigError(RATES.format(name=name, first=f"{first[name]:g}", own=f"{own[name]:g}", rank=rank))
        self._world.together(failure)

    def _refuse_length(self, total_steps: int) -> None:
        """Raise ConfigError if both a schedule and the run have another length: that does not follow from the number of ranks."""
        saved, failure = self._start.saved, None
        if self._is_other_length and saved and saved.manifest.get("total_steps") != total_steps:
            lengths = f"total_steps={saved.manifest.get('total_steps')}, and this is total_steps={total_steps}"
            failure = ConfigError(f"{self._loaded_instead} ({lengths}): build it as before; or {self._elsewhere}")
        self._world.together(failure)

    def _refuse_draws(self) -> None:
        """Raise ConfigError if the script has drawn random numbers since `track`: a resumed attempt would draw others."""
        failure = ConfigError(
            "random numbers were drawn or seeded between track() and batches(), where a resume draws others: draw them before "
            "track(), or from a generator of their own"
        )
        self._world.together(failure if drawn_from(self._generators) else None)

    def _refuse(self, name: str, value: Any, remedy: str, *, within: str | None = None) -> None:
        """Raise ConfigError or DataError unless the checkpoint has this value, or none."""
        saved = self._start.saved
        manifest = saved.manifest if saved else {}
        before = (manifest.get(within) or {}).get(name) if within else manifest.get(name)
        if before is not None and before != value and saved:
            kind = DataError if name == "fingerprint" else ConfigError
            raise kind(
                f"{saved.path} was written with {name}={_listed(before)}, and this is {name}={_listed(value)}: {remedy}, or "
                f"{self._elsewhere}"
            )


def _listed(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value
