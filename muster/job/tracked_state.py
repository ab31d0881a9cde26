"""The state of what a loop trains, by the names that it tracks: modules, optimizers, and other objects with a state.

Every tensor of a module or an optimizer has a name that is the same on every rank and at every world size, so the
checkpoint protocol stores it once if it is replicated (DDP), and in the pieces that it has if it is a DTensor
(fully_shard). Buffers may differ by rank, as batch-norm statistics do: then each rank's own are stored, too. The state of
any other object is one value: stored once if it is equal on all ranks, else by each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from muster.checkpoint.digests import differing
from muster.checkpoint.optimizer_state import empty_state, empty_states, flat_state, load_nested, nested_state
from muster.checkpoint.plain_values import dumps_plain, host_copy
from muster.checkpoint.state import is_finite
from muster.checkpoint.trained import COMPILED, EXTRA, SavedTensor, own_prefix, plain
from muster.data.fingerprint import hash_of
from muster.errors import ConfigError
from muster.job.accumulation import Accumulation, packed
from muster.job.replicas import kept_buffers, names_of_buffers, wrappers
from muster.job.unsaved_buffers import SPARSE, UNSAVED, UnsavedBuffers
from muster.world.dtensor import in_pieces, own_piece
from muster.world.group import World

GROUPS = "groups"
GRADIENTS = "gradients"
ZEROED = "zeroed"
FROZEN = "untrained"
"""The parameters that the loop did not train when it saved."""
STATISTICS = "running_mean", "running_var", "num_batches_tracked"
"""Buffers of batch norm."""
RESERVED = ("loop", "callbacks", GRADIENTS, ZEROED, FROZEN, UNSAVED)
"""Names that checkpoints have for other entries."""


class Tracked:
    """The tracked objects of a job, by name.

    Raises ConfigError: an object has no `state_dict()` and `load_state_dict()`, or a state that no checkpoint can hold.
    """

    def __init__(self, things: Mapping[str, Any], world: World):
        self.world = world
        for name, thing in things.items():
            _refuse(name, thing)
        self.modules = {name: unwrapped(thing) for name, thing in things.items() if isinstance(thing, nn.Module)}
        self.are_compiled = any(map(_is_compiled, things.values()))
        trained = [each for each in things.values() if isinstance(each, nn.Module) and _is_trained(each)]
        self.are_in_ddp = bool(trained) and all(isinstance(each, DistributedDataParallel) for each in trained)
        self.optimizers = {name: thing for name, thing in things.items() if isinstance(thing, Optimizer)}
        known = {*self.modules, *self.optimizers}
        self.others = {name: thing for name, thing in things.items() if name not in known}
        self._names = dict(self._named_parameters())
        for name, optimizer in self.optimizers.items():
            self._refuse_unnamed(name, optimizer)
        self.accumulation = Accumulation(self.optimizers, self._names, self.modules, self.others)
        self._used_lr: Any = None
        first = next(iter(self.optimizers.values()), None)
        first = getattr(first, "optimizer", first)  # Accelerate's wrapper has no hooks of its own
        if first and hasattr(first, "_optimizer_step_pre_hooks"):  # wrappers of other libraries have none
            first.register_step_pre_hook(self._note_lr)
        for name, value in self._of_modules().items():
            if not isinstance(value, Tensor):
                _check_plain(name, value, for_torch=True)  # as model.pt has it
            elif value.layout != torch.strided:
                raise ConfigError(SPARSE.format(name=name))
        for name, other in self.others.items():
            _check_plain(name, other.state_dict())
        self._saved_buffers = {*self._buffers()}
        self._unsaved_buffers = UnsavedBuffers(self.modules)
        self.first_apart = ""
        """A value of a module or an optimizer that differed between ranks in the last `state`; empty if none did."""
        self._frozen_again: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted([*self.modules, *self.optimizers, *self.others])

    @property
    def lr(self) -> float | None:
        """The learning rate of the first optimizer's first group, in its last step if it has made one; None without a rate."""
        groups = next((optimizer.param_groups for optimizer in self.optimizers.values()), [])
        used = groups[0].get("lr") if self._used_lr is None and groups else self._used_lr
        return None if used is None else float(used)

    def _note_lr(self, optimizer: Optimizer, *_: object) -> None:
        """Remember the rate that a step uses: a schedule sets the next one before the loop counts the step."""
        rate = optimizer.param_groups[0].get("lr")
        self._used_lr = rate.detach().clone() if isinstance(rate, Tensor) else rate

    def refuse_unsaved(self) -> None:
        """Raise ConfigError for an option of an optimizer, or a part of its state, that no checkpoint could give back."""
        for name, optimizer in self.optimizers.items():
            groups = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
            _check_plain(f"{name}.param_groups", groups)
        for name, value in _values(self._of_optimizers()).items():
            if not name.endswith(f"/{GROUPS}"):
                _check_plain(name, value)

    def needs_two(self) -> str:
        """Return the name and kind of a layer that is trained on two samples or more, if these are of one value each; empty without one."""
        found = (
            f"{name}.{part}".rstrip(".")
            for name, module in self.modules.items()
            for part, each in module.named_modules()
            if isinstance(each, nn.BatchNorm1d) and each.training
        )
        return next((f"{name} (BatchNorm1d)" for name in found), "")

    def rates(self) -> dict[str, float]:
        """Return the present numbers of all optimizers' groups, and of schedules: `{"optimizer.1.lr": 0.1, "schedule.best": 2.0}`."""
        groups = {
            f"{name}.{number}" if number else name: group
            for name, optimizer in self.optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
        }
        groups |= {name: each.state_dict() for name, each in self.others.items() if isinstance(each, LRScheduler)}
        return {
            f"{place}.{key}": float(value)
            for place, group in groups.items()
            for key, value in group.items()
            if isinstance(value, int | float | np.number) or (isinstance(value, Tensor) and value.numel() == 1)
        }

    def shapes(self) -> str:
        """Return a digest of the names and global shapes of the modules' entries."""
        return hash_of((name, _shape(value)) for name, value in sorted(self._of_modules().items()))

    @property
    def named(self) -> dict[str, Tensor]:
        """The parameters of all modules by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def parameters(self) -> list[Tensor]:
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    @property
    def are_averaged(self) -> bool:
        """Whether torch makes the mean of the ranks' gradients: in DistributedDataParallel, and after fully_shard."""
        return self.are_in_ddp or any(map(in_pieces, self.parameters()))

    def is_finite(self) -> bool:
        """Return True if all parameters are finite on all ranks. Collective."""
        own = all(is_finite(own_piece(each.detach())) for each in self.parameters())
        return self.world.lowest(not own) is None

    def state(self) -> dict[str, Any]:
        """Return the flat state for a checkpoint. Collective."""
        found = self._of_modules() | self._of_optimizers()
        for names in self.world.gather(sorted(self._unsaved_buffers.changed(by_data=True))):
            self._unsaved_buffers.add_changed(names)  # of any rank, so that all ranks save the same
        buffers = {name: found.pop(name) for name in self._buffers()} | self._unsaved_buffers.changed()
        gradients = self.accumulation.gradients()
        pieces = {f"{GRADIENTS}/{name}": each for name, each in gradients.items() if in_pieces(each)}
        values = {name: found.pop(name) for name in _values(found)}
        return found | pieces | kept_buffers(buffers, self.world) | self._of_ranks(values, gradients)

    def replica(self) -> dict[str, Any]:
        """Return this rank's state of modules and optimizers, with its own buffers; no communication."""
        return self._of_modules() | self._of_optimizers()

    def plain(self) -> dict[str, Any]:
        """Return copies of the options of all optimizers' groups, and of the state of the other objects."""
        groups = {
            f"{name}/{GROUPS}": [
                {key: names if key == "params" else host_copy(value) for key, value in group.items()}
                for group, names in self._groups(optimizer)
            ]
            for name, optimizer in self.optimizers.items()
        }
        return groups | {name: host_copy(each.state_dict()) for name, each in self.others.items()}

    def of_optimizers(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._of_optimizers().items() if isinstance(value, Tensor)}

    @property
    def extra(self) -> str:
        """The first entry of a module's state that is neither a parameter nor a buffer (`get_extra_state`); empty if none."""
        found, beside = self._of_modules().items(), self.beside
        return next((name for name, each in found if not isinstance(each, Tensor) or name in beside), "")

    @property
    def beside(self) -> list[str]:
        """The tensors that a module's own `state_dict` adds to its parameters and buffers, as a metric of torchmetrics does."""
        known = names_of_buffers(self.modules)
        return [name for name in self._buffers() if name not in known]

    def buffers(self) -> dict[str, Tensor]:
        """Return the replicated buffers that checkpoints hold, as they are now: a module may assign new ones."""
        saved = {
            full: buffer
            for name, module in self.modules.items()
            for inner, buffer in module.named_buffers(remove_duplicate=False)
            if (full := f"{name}/{plain(inner)}") in self._saved_buffers
        }
        return saved | self._unsaved_buffers.changed()

    def buffer_of_rank_0(self, saved: Collection[str]) -> str:
        """Return a buffer that each rank has `saved` as its own, and that a world of another size takes from rank 0; empty if none.

        A model in DistributedDataParallel has rank 0's at any size, unless `broadcast_buffers=False`. With one rank, it is unknown whether
        the model was in it: so batch norm's statistics do not count.
        """
        broadcast = [each.module for each in wrappers([*self.modules.values()]) if each.broadcast_buffers]
        kept = {name for name, module in self.modules.items() if module not in broadcast}
        found = (name.removeprefix(own_prefix(1)) for name in saved if name.startswith(own_prefix(1)))
        norms = {
            f"{name}/{plain(f'{at}.{each}'.lstrip('.'))}"
            for name, module in self.modules.items()
            for at, part in module.named_modules()
            if isinstance(part, _NormBase)
            for each in STATISTICS
        }
        own = (name for name in found if name not in norms)
        return next((name for name in own if name.removeprefix(f"{UNSAVED}/").partition("/")[0] in kept), "")

    @property
    def has_buffers(self) -> bool:
        """True if a module has a buffer that is not in pieces, saved or not."""
        return bool(self._saved_buffers or self._unsaved_buffers.exist)

    def frozen_again(self) -> str:
        """Return the first parameter that was trained when the state was saved, and is frozen now; empty if none."""
        return next((name for name in self._frozen_again if not self.named[name].requires_grad), "")

    def frozen(self) -> list[str]:
        return [name for name, parameter in self.named.items() if not parameter.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._of_modules().items() if isinstance(value, Tensor)}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """See `Trained.targets`. Raises ConfigError: a tracked module has other names or shapes than the saved one."""
        here = {name: value for name, value in self._of_modules().items() if isinstance(value, Tensor)}
        there = {name: facts for name, facts in saved.items() if name.partition("/")[0] in self.modules}
        for name in sorted(here.keys() ^ there.keys()):
            where = "has no" if name in here else "has a"
            raise ConfigError(f"the checkpoint {where} {name}, unlike this model: track the same model")
        resized = self._resized(here, there)
        for name, tensor in (here | resized).items():
            if tensor.shape != there[name].size:
                both = f"{list(there[name].size)} in the checkpoint and {list(tensor.shape)} here"
                more = ", on as many ranks if this is of a rank's own samples" if name in self._saved_buffers else ""
                raise ConfigError(f"the checkpoint does not fit: {name} is {both}; track the same model{more}")
        return here | resized | self._buffer_targets(saved) | dict(self._optimizer_targets(saved))

    def _resized(self, here: Mapping[str, Tensor], there: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return tensors for what has another shape in a checkpoint, and a module of its own way of loading: a fake-quantizer's scales, extra state."""
        loads = {
            (name, plain(f"{path}.").rstrip("."))
            for name, root in self.modules.items()
            for path, module in root.named_modules()
            if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            and not isinstance(module, _NormBase)
        }

        def is_resized(full: str) -> bool:
            name, _, inner = full.partition("/")
            path, _, own = inner.rpartition(".")
            return own == EXTRA or (name, path) in loads

        other = {name for name, each in here.items() if each.shape != there[name].size} - self._names_of_parameters()
        return {name: torch.empty(there[name].size, dtype=there[name].dtype) for name in other if is_resized(name)}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Trained.load`. Raises ConfigError: the state does not fit, or is each rank's own and of another world size."""
        own = below(state, own_prefix(self.world.rank).removesuffix("/"))
        try:
            for name, module in self.modules.items():
                real = {plain(inner): inner for inner in module.state_dict()}
                found = {**below(state, name), **below(own, name)}
                module.load_state_dict({real.get(inner, inner): value for inner, value in found.items()})
            for name, optimizer in self.optimizers.items():
                self._load_optimizer(name, optimizer, {**below(state, name), **below(own, name)})
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(f"the checkpoint does not fit what is tracked: {error}") from error
        for name, other in self.others.items():
            other.load_state_dict(self._of_this_rank(name, state))
        self._unsaved_buffers.load({**below(state, UNSAVED), **below(own, UNSAVED)}, self.world.device)
        before = state.get(FROZEN)
        self._frozen_again = [] if before is None else [name for name in self.frozen() if name not in before]
        gradients = {**self._of_this_rank(GRADIENTS, state), **below(state, GRADIENTS)}
        self.accumulation.restore(gradients, own.get(ZEROED, state.get(ZEROED, ())))

    def _of_this_rank(self, name: str, state: Mapping[str, Any]) -> Any:
        own = f"{own_prefix(self.world.rank)}{name}"
        if own not in state and name not in state:
            raise ConfigError(
                f"{name} had another state on each rank, and the checkpoint was saved at another world size: "
                "resume with as many ranks as before, or take samples from job.batches(dataset, ...)"
            )
        return state[own] if own in state else state[name]

    def _named_parameters(self) -> Iterator[tuple[Tensor, str]]:
        for name, module in self.modules.items():
            for inner, parameter in module.named_parameters():
                yield parameter, f"{name}/{plain(inner)}"

    def _refuse_unnamed(self, name: str, optimizer: Optimizer) -> None:
        unknown = [each for group in optimizer.param_groups for each in group["params"] if each not in self._names]
        if unknown:
            raise ConfigError(
                f"{name} has a parameter {list(unknown[0].shape)} of no tracked module: track the module, too, as in "
                f"track(model=model, {name}={name})"
            )

    def _of_modules(self) -> dict[str, Any]:
        return {
            f"{name}/{plain(inner)}": value
            for name, module in self.modules.items()
            for inner, value in module.state_dict().items()
        }

    def _buffers(self) -> list[str]:
        """Return the names of the replicated tensors that the modules save beside their parameters, in order.

        They are buffers, and what a module's own `state_dict` adds, as a torchmetrics metric does: each rank has its own.
        """
        known = self._names_of_parameters()
        found = {name: value for name, value in self._of_modules().items() if isinstance(value, Tensor)}
        return [name for name, value in found.items() if name not in known and not in_pieces(value)]

    def _names_of_parameters(self) -> set[str]:
        return {
            f"{name}/{plain(inner)}"
            for name, module in self.modules.items()
            for inner, _ in module.named_parameters(remove_duplicate=False)
        }

    def _buffer_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return tensors for buffers that no module saves, and at the same world size for this rank's own."""
        own, last, beyond = (own_prefix(rank) for rank in (self.world.rank, self.world.size - 1, self.world.size))
        unsaved = [name for name in saved if name.startswith(f"{UNSAVED}/")]
        owned = [
            f"{own}{name}"
            for name in [*self._buffers(), *unsaved]
            if f"{own}{name}" in saved and f"{last}{name}" in saved and f"{beyond}{name}" not in saved
        ]
        return {name: torch.empty(saved[name].size, dtype=saved[name].dtype) for name in [*unsaved, *owned]}

    def _of_optimizers(self) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, optimizer in self.optimizers.items():
            found |= self._of_optimizer(name, optimizer)
        return found

    def _of_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Return `name/PARAMETER/KEY` for the optimizer's state, and its groups' options with parameter names."""
        if strange := next((key for key in optimizer.state if key not in self._names), None):
            raise ConfigError(
                f"{name} keeps state by {type(strange).__name__}, which no checkpoint can name: keep it by parameter"
            )
        flat = flat_state(optimizer, self._names, name)
        groups = [{**group, "params": names} for group, names in self._groups(optimizer)]
        return {**flat, f"{name}/{GROUPS}": groups}

    def _groups(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[str]]]:
        for group in optimizer.param_groups:
            yield group, [self._names[parameter] for parameter in group["params"]]

    def _of_ranks(self, values: Mapping[str, Any], gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return values of modules and optimizers, the state of the other objects, whole gradients, and names of zeroed and frozen parameters. Collective.

        What differs between ranks has their prefix, but for rank 0's `values` if the others have such, too: what reads weights alone expects
        these. Frozen names are then left out.
        """
        others: dict[str, Any] = {name: self.others[name].state_dict() for name in sorted(self.others)}
        others[GRADIENTS] = {name: packed(each) for name, each in gradients.items() if not in_pieces(each)}
        others[ZEROED], others[FROZEN] = self.accumulation.zeroed(gradients), self.frozen()
        kept, whole = dict[str, Any](), {**values, **others}
        different = differing(whole, self.world)
        self.first_apart = min(different.keys() & values.keys(), default="")
        for name in whole:
            if name == FROZEN and name in different:
                continue
            is_plain = name not in different or (name in values and self.world.is_first and different[name])
            kept[name if is_plain else f"{own_prefix(self.world.rank)}{name}"] = whole[name]
        return kept

    def apart(self) -> str:
        """Return a value of the optimizers, beside tensors, that differs between ranks; empty if none does. Collective."""
        return min(differing(_values(self._of_optimizers()), self.world), default="")

    def of_ranks(self, saved: Collection[str]) -> str:
        """Return a value of a module or an optimizer that each rank has `saved` as its own; empty if none."""
        roots = {*self.modules, *self.optimizers}
        found = (name.partition("/")[2] for name in saved if name.startswith("rank-"))
        return next((name for name in found if "/" in name and name.partition("/")[0] in roots), "")

    def _optimizer_targets(self, saved: Mapping[str, SavedTensor]) -> Iterator[tuple[str, Tensor]]:
        parameters = self.named
        for each in self.optimizers:
            yield from empty_states(saved, parameters, each)
        for name, facts in below(saved, GRADIENTS).items():
            if name in parameters:
                yield f"{GRADIENTS}/{name}", empty_state("", facts, parameters[name])

    def _load_optimizer(self, name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        saved = state[GROUPS]
        self._add_groups(optimizer, saved)
        groups = [names for _, names in self._groups(optimizer)]
        if [group["params"] for group in saved] != groups:
            raise ValueError(f"{name} had other parameters, or in other groups")
        nested = nested_state({key: value for key, value in state.items() if key != GROUPS}, groups, saved)
        load_nested(optimizer, nested)

    def _add_groups(self, optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
        """Add the saved state's further groups, for a loop that adds groups in its course."""
        for group in saved[len(optimizer.param_groups) :]:
            optimizer.add_param_group({**group, "params": [self.named[name] for name in group["params"]]})


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is no tensor."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile, in any order."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _is_compiled(thing: Any) -> bool:
    return isinstance(thing, nn.Module) and any(type(each).__name__ == COMPILED for each in thing.modules())


def _inner(module: nn.Module) -> Any:
    if type(module).__name__ == COMPILED:
        return module._orig_mod
    return module.module if isinstance(module, DistributedDataParallel | nn.DataParallel) else None


def below(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of `state` below `name/`, without this prefix."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _refuse(name: str, thing: Any) -> None:
    if name in RESERVED:
        raise ConfigError(f"track({name}=...): checkpoints use the name {name} themselves: choose another")
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ConfigError(
            f"track({name}=...) is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(): "
            "give a module, an optimizer, or another object with both"
        )
    if isinstance(thing, Optimizer) and (more := sorted(thing.state_dict().keys() - {"state", "param_groups"})):
        raise ConfigError(
            f"track({name}=...) is of type {type(thing).__name__}, an optimizer whose state_dict() also has {more[0]}, and here "
            "an optimizer's state is stored by parameter: track the optimizer that it wraps, or an object of yours whose "
            "state_dict() and load_state_dict() call its own"
        )
    if isinstance(thing, nn.Module) and any(map(is_lazy, [*thing.parameters(), *thing.buffers()])):
        raise ConfigError(
            f"track({name}=...) has parameters without a shape yet: put one batch through it before track()"
        )
    is_metric = all(callable(getattr(thing, each, None)) for each in ("update", "compute", "reset"))
    if isinstance(thing, nn.Module) and is_metric and not thing.state_dict():
        raise ConfigError(
            f"track({name}=...) is of type {type(thing).__name__}, whose state_dict() is empty, so nothing of it would be saved: leave "
            "it out; or have it save its state, as a metric of torchmetrics does after metric.persistent(True)"
        )
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(thing, zero.ZeroRedundancyOptimizer):
        raise ConfigError(
            f"track({name}=...) is a ZeroRedundancyOptimizer, whose state has no names: shard it with fully_shard"
        )


def _is_trained(module: nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _check_plain(name: str, state: Any, *, for_torch: bool = False) -> None:
    """Raise ConfigError for a state that no checkpoint holds, or that torch.load does not read by itself."""
    if any(in_pieces(leaf) for leaf in pytree.tree_leaves(state)):
        raise ConfigError(f"{name} holds DTensors outside of a module and an optimizer: track those")
    copied = host_copy(state)  # of two views of one memory each has its own, as in a checkpoint
    dumps_plain(copied, name, for_torch=for_torch)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None
