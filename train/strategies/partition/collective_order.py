"""A check that all ranks reach the collectives of sharded units in the same order, with a one-line error otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.errors import ConfigError
from muster.train.strategies.step.gradient import used_anywhere
from muster.world.group import World

END = 0
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.15
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Lockstep:
    """Compares across ranks, before each collective of a unit, which collective each rank has reached.

    Without it, ranks that call different units (routing, stochastic depth) would silently gather different units of the
    same size together; where sizes differ, gloo ends the process. Within a unit, ranks may use different parameters: a
    rank without a gradient contributes zeros, and a parameter that no rank used keeps no gradient, as in one process.

    model, units: `fully_shard` was called on the units, then on the model.
    shards: number of ranks that share a parameter; with 1, nothing is gathered and replicas all-reduce.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], world: World, *, shards: int):
        self.model, self.world = model, world
        self._units: list[Any] = [*units, model]
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[unit] or type(model).__name__ for unit in self._units]
        self._used: set[str] = set()
        self._watched: dict[str, nn.Parameter] | None = None
        for number, unit in enumerate(self._units):
            unit.set_custom_all_gather(Gather(self, 2 * number + 1))
            unit.set_custom_reduce_scatter(Reduce(self, 2 * number + 2, always=shards == 1))
        zeros: Any = getattr(model, "set_reduce_scatter_unused_params", None)  # not before torch 2.15
        if zeros:
            zeros(True)
        self._may_differ = bool(zeros)

    def begin(self) -> None:
        """Start a step; call it before the first forward pass. Collective."""
        if self._watched is None:
            self._watch()
        self._used.clear()

    def reduced(self) -> None:
        """End a step, after the last backward pass; drops gradients of parameters that no rank used. Collective.

        Raises ConfigError: not all ranks have reached the end of the step.
        """
        self.agree(END)
        assert self._watched is not None
        for name in self._watched.keys() - used_anywhere(self._used, self.world, names=[*self._watched]):
            self._watched[name].grad = None

    def agree(self, here: int) -> None:
        """Raise ConfigError on all ranks unless all ranks are at the place `here`. Collective.

        Before torch 2.15, also raises if ranks use different parameters of a unit.
        """
        used = 0 if self._may_differ or here % 2 else crc32(repr(sorted(self._used)).encode()) % 2**20
        at, at_squared, of, of_squared = self.world.sum([here, here * here, used, used * used])  # exact: small integers
        if self.world.size * at_squared == at * at and self.world.size * of_squared == of * of:
            return
        places = self.world.gather(here)
        rank = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if rank is None:
            raise ConfigError("ranks use different parameters of a unit, which needs torch 2.15: or use strategy=ddp")
        raise ConfigError(
            f"ranks that share sharded parameters have to call the same units in the same order: rank 0 has reached "
            f"{self._told(places[0])}, rank {rank} to {self._told(places[rank])}. Let all ranks make the same choice, name in "
            "strategy.units modules that every forward pass calls and that contain the choice, or use strategy=ddp "
            "strategy.find_unused_parameters=true"
        )

    def _told(self, place: int) -> str:
        if place == END:
            return "the end of a pass"
        return f"the {'forward' if place % 2 else 'gradient'} of {self._names[(place - 1) // 2]}"

    def _watch(self) -> None:
        """Register hooks that record which full parameters get a gradient: unit by unit, as they exist only after a unit is gathered."""
        self._watched = {}
        sharded = dict(self.model.named_parameters())
        for unit in self._units:
            unit.unshard()
            for name, whole in self.model.named_parameters():
                if whole is not sharded[name] and whole.requires_grad:
                    self._watched[name] = sharded[name]
                    whole.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))  # type: ignore[no-untyped-call]
            unit.reshard()


class Comm:
    """Base of the custom collectives that FSDP calls for a unit; `place` numbers them over all units."""

    def __init__(self, lockstep: Lockstep, place: int, *, always: bool = False):
        self.lockstep, self.place, self.always = lockstep, place, always

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the collective's buffer; with `always`, check the ranks' places, too."""
        if self.always:  # with one shard, torch calls nothing but this method
            self.lockstep.agree(self.place)
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Comm):
    """All-gather of a unit's parameters, after a check of the ranks' places."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.lockstep.agree(self.place)
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class Reduce(Comm):
    """Reduce-scatter of a unit's gradients, after a check of the ranks' places."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.lockstep.agree(self.place)
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return work
