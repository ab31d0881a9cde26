"""What a loop does that no checkpoint can know: it is looked for while the loop runs, and told once, in a note."""

from __future__ import annotations

import gc
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

from muster.checkpoint.tensor_versions import Changes
from muster.data.fingerprint import hash_of, look
from muster.errors import ConfigError
from muster.job.batch_source import BatchSource, LoaderSource, is_undivided, parts_of, read_now
from muster.job.carried_state import BEST, COUNT, RATE, STATE, carried, early, enumerated, own_frames
from muster.job.held_objects import holds, saves, saves_more, untracked_beside
from muster.job.own_draws import OwnDraws
from muster.job.own_numbers import OwnNumbers
from muster.job.own_tensors import LOOKS, MODULE, NUMBERS, OwnTensors, memory_of
from muster.job.summed_loss import BACKWARD
from muster.job.tracked_state import Tracked
from muster.job.trainee import REPLICATED, Reached
from muster.world.group import World

UNTRACKED = "{name} steps the model and is not tracked: a resume, or the death of a rank, would begin its state anew; name it: track(model=..., optimizer=...)"
UNTRAINED = (
    "{name} and the parameters that it steps are not tracked: a resume, or the death of a rank, would begin both anew; name both, as in "
    "track(critic=..., critic_optimizer=...), or make in each step what each step begins anew"
)
UNSCHEDULED = (
    "{kind}, the schedule of {name}, is not tracked: a resume, or the death of a rank, would begin it anew; name it: track(schedule=...), also if your "
    "code sets it from job.steps_done"
)
UNSCALED = "{kind}, the gradient scaler of {name}, is not tracked: a resume, or the death of a rank, would begin its scale anew; name it: track(scaler=...)"
NO_OPTIMIZER = (
    "no optimizer is tracked: what the loop itself keeps for its updates, such as a rate in a variable, is in no checkpoint, and a resume, or the "
    "death of a rank, begins it anew; follow it from job.steps_done, or track an object that holds it"
)
CARRIED = "{name} {verb} from batch to batch in a variable of the loop ({line}), which is in no checkpoint: a resume, or the death of a rank, begins it anew"
REMEDIES = {
    STATE: ", and other weights may follow; keep it in a buffer of a tracked module, if training reads it",
    COUNT: "; hold it in a buffer of a tracked module if the loop reads it, give it to job.step(name=value) or job.log if it is to be seen, or follow it "
    "from job.steps_done",
    RATE: ", and other weights may follow; read it from optimizer.param_groups[0]['lr'] after job.track(), which restores it, or follow it from job.steps_done",
    BEST: "; let job.evaluate(..., best=name) choose, and read job.best, or follow it from job.steps_done",
}
ENUMERATED = "{name} counts the batches of this attempt, and begins with 0 again after a resume, or the death of a rank: follow job.steps_done where it matters"
FORGOTTEN = (
    "{name} is changed by the loop and is not tracked: a resume, or the death of a rank, would begin it anew, unless a tracked object saves it or each "
    "step sets it anew; {remedy}"
)
NAME_IT = "name it: track({short}={name}), which takes a module, or any object with state_dict() and load_state_dict()"
HOLD_IT = "hold it in a module's buffers, or in an object with state_dict() and load_state_dict(), and track that"
OWN_NUMBERS = (
    "{names} {verb} changed by the loop and in no checkpoint: a resume, or the death of a rank, begins {them} anew, unless each step sets {them} anew; follow "
    "{them} from job.steps_done, let job.evaluate(..., best=name) choose the best, or track an object that has such numbers in its state_dict()"
)
GROWN = (
    "the loop adds numbers to {names}, and no checkpoint has {them}: after a resume, or the death of a rank, a mean or a curve of {them} leaves out what "
    "came before, unless your code saves {them}; give the numbers to job.step(name=value), whose records have them all, or track an object that has "
    "{them} in its state_dict()"
)
MODE = (
    "{name} is trained in evaluation mode at step {step}, and was in training mode before, so dropout and batch norm work otherwise: call train() "
    "after an evaluation of your own; job.evaluate does so"
)
NAMED = 4
OWN_GENERATOR = (
    "the loop draws from {name}, which no checkpoint has: a resume, or the death of a rank, begins it anew, unless your code seeds it from "
    "job.steps_done; draw from the global generators of Python, NumPy or torch, which are saved, or give an environment's reset() a seed that follows "
    "from job.steps_done and job.rank"
)
OWN_LOADER = (
    "the loop reads a DataLoader by itself: after a resume, the death of a rank, or the end of the run if the command is repeated, it begins with the "
    "loader's first batch again, unless your code goes on from job.steps_done{more}; give the loader to job.batches(), which goes on with the next batch"
)
EARLY = (
    "{call} ({line}) comes before job.step() in the loop over a tracked loader, which has gone on to the next batch: a checkpoint or a stop there leaves that batch "
    "out, and a resume never trains on it; call it after job.step()"
)
SAME_ORDER = (
    "the loop's DistributedSampler has the same epoch as an epoch ago, so the samples come in the same order: call sampler.set_epoch(epoch), or give "
    "the loader to job.batches(), which does"
)
UNDIVIDED = ", and its {sampler} does not divide the samples among the ranks"
ALIKE = (
    "the first batch of the loader is the same on all {ranks} ranks: unless this is meant, let each rank's sampler or stream have its own share "
    "of the samples, by job.rank and job.world_size, or give batches() the data set itself"
)
NO_COUNT = (
    "{what}, and batches() has no count=: a step's mean losses over what is not left out weigh alike, though each rank and micro-batch has unlike many; give "
    "batches(..., count=lambda batch: ...) that number, as (batch[1] != IGNORED).sum() or sum(lengths), and use "
    f"{BACKWARD}"
)
LEAVE_OUT = {
    "ignore_index": "has a loss with an ignore_index",
    r"pack_padded_sequence\(.*\)(\[0\]|\.data)": "takes the values of packed sequences, without the padding",
}
"""What in a script shows that its loss may leave something out."""
IGNORED = -100
"""The label that torch's losses ignore by default."""
FROZEN = (
    "{name} was thawed before the state was saved that this attempt goes on from, and is frozen here, so it is trained no further: "
    "thaw it after track() where job.steps_done says that it was"
)

BETWEEN = 25
"""The fewest steps from the last look to one at the end of an epoch, which may have one step."""


class LoopWatch:
    """Looks at a loop's optimizers, modules and variables, from `open` on.

    tell: records a note under a name, once. refuse_survival: says why no rank's death is survived.
    """

    def __init__(
        self,
        tracked: Tracked,
        reached: Reached,
        world: World,
        *,
        tell: Callable[[str, str], None],
        refuse_survival: Callable[[str], None],
    ):
        self._tracked, self._reached, self._world = tracked, reached, world
        self._tell, self._refuse_survival = tell, refuse_survival
        self._batch_source: BatchSource | None = None
        self._stepped = set[int]()
        """The optimizers that have made a step, tracked or not."""
        self.begun = 0
        """The steps that have begun in this attempt."""
        self._looks_now, self._looked = False, 0
        self._has_looked = self._has_seen_batch = False
        self._own_draws, self._own_numbers, self._own_tensors = OwnDraws(), OwnNumbers(), OwnTensors()
        self._own_sampler: tuple[ref[DistributedSampler[Any]], int, int] | None = None
        """The sampler of the loop's own loader, its epoch after the first step, and a step of the next one."""
        self._has_trained, self._trains = set[str](), dict[tuple[str, int], bool]()
        """The modules that were in training mode at a step of their optimizer; and by module and id of an optimizer, whether it is its own."""
        self._looks = 0 if tracked.optimizers or tracked.others else LOOKS
        """The steps after which a loop without an optimizer is still asked whether it trains."""
        self._at_first = Changes(tracked.named.items() if self._looks else ())

    def open(self, batch_source: BatchSource | None, *, is_new: bool) -> Callable[[], None]:
        """Look at optimizers from now on; return the call that ends this. is_new: no attempt before has made a step."""
        self._batch_source = batch_source
        self._at_first.look()
        return self._see_optimizers(is_new=is_new)

    def begin_step(self) -> None:
        """Look at the script's own objects before the body of a step."""
        self.begun += 1
        if self.begun == 1:
            self._own_numbers.begin(sys._getframe(), self._apart)
        self._looks_now = self.begun <= LOOKS or self.begun >= self._looked + (BETWEEN if self._ends_epoch() else LOOKS)
        if self._looks_now:
            self._looked = self.begun
            parameters = self._tracked.parameters()
            gradients = [each.grad for each in parameters if each.grad is not None]
            known = {*map(memory_of, (*parameters, *gradients, *self._tracked.buffers().values()))}
            self._own_draws.begin(sys._getframe())
            modules = {id(each) for root in self._tracked.modules.values() for each in root.modules()}
            self._own_tensors.begin(sys._getframe(), known, partial(holds, self._tracked), modules)

    def _ends_epoch(self) -> bool:
        """Return whether the step that begins is an epoch's last: a loop may change something then alone."""
        source = self._batch_source
        return source is not None and (self._reached.step + 1) % source.steps_per_epoch == 0

    def end_step(self, *, epoch: int, is_saved: bool) -> None:
        """Look at what the body of a step has changed. is_saved: a checkpoint of it follows."""
        if self._looks:
            self._looks -= 1
            self._note_untracked()
        if not self._has_looked:
            self._has_looked = True
            self._tracked.refuse_unsaved()
            self._look_once()
        if self._looks_now or is_saved:
            self._look_at_own(epoch)
        if self._own_sampler and self._reached.step == self._own_sampler[2]:
            sampler = self._own_sampler[0]()
            if sampler is not None and sampler.epoch == self._own_sampler[1]:
                self._tell("set_epoch", SAME_ORDER)

    def _see_optimizers(self, *, is_new: bool) -> Callable[[], None]:
        """Note an untracked optimizer, with its parameters or without: a resume begins it anew, and no death is survived.

        So would an untracked schedule. Both are refused in a run that begins, if no tracked object may hold them unseen.
        """
        seen, trained = self._stepped, {id(each) for each in self._tracked.parameters()}
        untracked = dict[int, tuple[ref[Optimizer], Callable[[], Any], int]]()

        def look(optimizer: Optimizer, *_: Any) -> None:
            self._see_modes(optimizer)
            is_again = False
            if id(optimizer) in seen:
                if not (first := untracked.get(id(optimizer))):
                    return
                same, before, step = first
                is_again = same() is optimizer and before() is _state_of(optimizer) and self._reached.step > step
                if not is_again:
                    return
                del untracked[id(optimizer)]
            stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
            is_of_model, state = bool(trained & stepped), _state_of(optimizer)
            if not is_of_model and state is None:
                return
            seen.add(id(optimizer))
            name = type(optimizer).__name__
            knows_all = all(isinstance(each, REPLICATED) for each in self._tracked.others.values())
            is_certain = knows_all and is_new
            if not saves(self._tracked, optimizer):
                if not is_again and state is not None and (is_certain or not is_of_model):
                    # looked at in another step: an optimizer, or a state, that is made in each begins anew anyway
                    untracked[id(optimizer)] = ref(optimizer), ref(state), self._reached.step
                    return
                text = (UNTRACKED if is_of_model else UNTRAINED).format(name=name)
                if is_again and is_certain:
                    raise ConfigError(text)
                self._tell(f"untracked {name}", text)
                self._refuse_survival(f"{name} is not tracked")
            found = untracked_beside(self._tracked, optimizer)
            if found and is_certain:
                found.clear()
                gc.collect()  # one that was replaced may be in a cycle of references
                found = untracked_beside(self._tracked, optimizer)
            for each in found:
                kind = type(each).__name__
                text = (UNSCHEDULED if isinstance(each, LRScheduler) else UNSCALED).format(kind=kind, name=name)
                if is_certain:
                    raise ConfigError(text)
                self._tell(f"untracked {kind}", text)

        return register_optimizer_step_post_hook(look).remove

    def _note_untracked(self) -> None:
        """Note that a loop without an optimizer trains by a rule of its own."""
        if not self._stepped and (self._at_first.changed() or self._at_first.changed_unseen()):
            self._looks = 0
            self._tell("no optimizer", NO_OPTIMIZER)

    def _look_once(self) -> None:
        """Note, after the first step, what the loop does that a checkpoint cannot know."""
        if self._world.is_first and (name := self._tracked.frozen_again()):
            self._tell("frozen", FROZEN.format(name=name))
        found = defaultdict[tuple[str, str], list[str]](list)
        rates = [value for name, value in self._tracked.rates().items() if name.endswith("lr")]
        for name, line, kind in [*carried(sys._getframe(), {*map(id, self._tracked.parameters())}, rates)]:
            found[kind, str(line)].append(name)
        for (kind, where), names in found.items():
            verb, remedy = "goes" if len(names) == 1 else "go", REMEDIES[kind]
            text = CARRIED.format(name=", ".join(names), verb=verb, line=where)
            self._tell(f"carried {', '.join(names)}", text + remedy)
        if self._batch_source and (name := enumerated(sys._getframe())):
            self._tell("enumerate", ENUMERATED.format(name=name))
        loaders = {id(each) for each in self._tracked.others.values() if hasattr(each, "__iter__")}
        if self._batch_source is None and loaders and (found_early := early(sys._getframe(), loaders)):
            self._tell("early call", EARLY.format(call=found_early[0], line=found_early[1]))
        if self._batch_source is None and not loaders and (batches := read_now()) is not None:
            apart = self._world.size > 1 and is_undivided(batches)
            more = UNDIVIDED.format(sampler=type(batches.sampler).__name__) if apart else ""
            self._tell("own loader", OWN_LOADER.format(more=more))
            if isinstance(batches.sampler, DistributedSampler) and batches.sampler.shuffle:
                self._own_sampler = ref(batches.sampler), batches.sampler.epoch, self._reached.step + len(batches)

    def _look_at_own(self, epoch: int) -> None:
        """Note what the step has changed in objects of the script's own that are not tracked."""
        step = self._reached.step
        if drawn := self._own_draws.drawn(sys._getframe()):
            self._tell("own generator", OWN_GENERATOR.format(name=drawn))
        own = self._own_tensors.changed() or []
        if grown := [name for name, kind in own if kind == NUMBERS]:
            self._tell(f"own {grown[0]}", GROWN.format(**_named(grown)))
        for name, kind in own:
            if kind != NUMBERS:
                remedy = NAME_IT.format(name=name, short=name.rpartition(".")[2]) if kind == MODULE else HOLD_IT
                self._tell(f"own {name}", FORGOTTEN.format(name=name, remedy=remedy))
        known = {step, step - 1, epoch, epoch + 1}
        found = self._own_numbers.changed(sys._getframe(), self._apart, known=known, is_saved=self._saves)
        if found:
            self._tell(f"own {found[0]}", OWN_NUMBERS.format(**_named(found)))

    def _apart(self) -> set[int]:
        """The ids of objects whose numbers a checkpoint has, or this job sets."""
        optimizers = self._tracked.optimizers.values()
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        saved = (*self._tracked.others.values(), *optimizers, *groups)
        return {*map(id, saved), *map(id, parts_of(self._batch_source.source) if self._batch_source else ())}

    def _saves(self, owner: object) -> bool:
        """Return True if a tracked object may save the numbers of another, or a module that saves more than its buffers its own.

        owner: None for a global name.
        """
        if owner is None:
            return False
        return saves_more(owner) or holds(self._tracked, owner)

    def _see_modes(self, optimizer: Optimizer) -> None:
        """Note, at an optimizer's step, a model that is trained in evaluation mode, and was in training mode before."""
        for name, module in self._tracked.modules.items():
            if (trains := self._trains.get((name, id(optimizer)))) is None:
                stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
                trains = self._trains[name, id(optimizer)] = any(id(each) in stepped for each in module.parameters())
            if not trains:
                continue
            if module.training:
                self._has_trained.add(name)
            elif name in self._has_trained:
                self._has_trained.remove(name)
                self._tell(f"mode of {name}", MODE.format(name=name, step=self._reached.step + 1))

    def see_batch(self, batch: Any, *, is_whole: bool, has_count: bool) -> None:
        """Record a note if the first batch of the loop's own loader is the same on all ranks, or its loss may leave labels out. Collective.

        is_whole: it is all that a step has on this rank.
        """
        if self._has_seen_batch or (self._world.size == 1 and is_whole):
            return
        self._has_seen_batch = True
        if (
            isinstance(self._batch_source, LoaderSource)
            and self._world.size > 1
            and len({*self._world.gather(hash_of(look(batch)))}) == 1
        ):
            self._tell("alike", ALIKE.format(ranks=self._world.size))
        if not has_count and (what := next(filter(None, self._world.gather(_ignored(batch, sys._getframe()))), "")):
            self._tell("no count", NO_COUNT.format(what=what))


def _named(names: list[str]) -> dict[str, str]:
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return {"names": ", ".join([*names[:NAMED], *(["..."] if names[NAMED:] else [])]), "verb": verb, "them": them}


def _ignored(batch: Any, frame: FrameType) -> str:
    """Return what shows that the loop's loss ignores some labels; empty if nothing does."""
    plain = (each for each in pytree.tree_leaves(batch) if type(each) is Tensor and each.layout == torch.strided)
    labels = (
        each for each in plain if each.dtype == torch.int64 and each.numel() and not (each.is_nested or each.is_meta)
    )
    if any(int(each.min()) == IGNORED for each in labels):
        return f"the batch has labels of {IGNORED}, which losses ignore"
    for file in dict.fromkeys(each.f_code.co_filename for each in own_frames(frame)):
        text = "".join(linecache.getlines(file))
        if what := next((what for pattern, what in LEAVE_OUT.items() if re.search(pattern, text)), ""):
            return f"{Path(file).name} {what}"
    return ""


def _state_of(optimizer: Optimizer) -> Tensor | None:
    """Return a tensor of its state, which is the same one after each step unless the state begins anew; None without any."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return next((value for value in values if isinstance(value, Tensor)), None)
