"""The copies of replicated modules on several ranks: parameters, which must be equal, and buffers, which may differ.

Batch-norm statistics are an example of buffers: each rank's depend on its own samples, so an exact resume needs them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.dist.pieces import in_pieces
from muster.dist.world import World
from muster.errors import ConfigError


class Copies:
    """The copies of `modules` on all ranks. `entries` are those of the state dicts, by their tracked names.

    Args:
        modules: name -> module; its entries are named `name/ENTRY`.
        world: the ranks.
    """

    def __init__(self, modules: Mapping[str, nn.Module], world: World):
        self._modules, self._world = modules, world
        self._is_compared = world.size == 1

    def refuse_unequal(self, entries: Mapping[str, Any]) -> None:
        """Compare the parameters of all ranks, at the first call. Collective: every rank must call it.

        Raises:
            ConfigError: a parameter differs between ranks.
        """
        if self._is_compared:
            return
        self._is_compared = True
        parameters = {name: each for name, each in _whole(entries).items() if name in self._names()}
        sums = self._world.gather(_checksums([*parameters.values()]))
        unequal = [name for name, *theirs in zip(parameters, *sums, strict=True) if len({*theirs}) > 1]
        if unequal:
            raise ConfigError(
                f"{unequal[0]} differs between ranks, as {len(unequal)} of {len(parameters)} parameters do: each rank "
                "trains a model of its own; wrap it in DistributedDataParallel, or shard it with fully_shard"
            )

    def by_rank(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return the entries to save: if buffers differ, each rank's own, and rank 0's in common. Collective."""
        buffers = {name: each for name, each in _whole(entries).items() if name not in self._names()}
        if self._world.size == 1 or not buffers or self._are_equal(buffers):
            return entries
        first = self._world.is_first  # an entry that only one rank has is written by this rank
        shared = {name: each for name, each in entries.items() if first or name not in buffers}
        return shared | {self.own(name): each for name, each in buffers.items()}

    def own(self, name: str) -> str:
        """Return the name of this rank's own entry `name`."""
        return f"{own_prefix(self._world.rank)}{name}"

    def targets(self, entries: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Return tensors to read this rank's own entries into; none of a checkpoint of another world size."""
        size = self._world.size
        return {
            self.own(name): torch.empty_like(each)
            for name, each in entries.items()
            if self.own(name) in saved
            and f"{own_prefix(size - 1)}{name}" in saved
            and f"{own_prefix(size)}{name}" not in saved
        }

    def _names(self) -> set[str]:
        return {
            f"{name}/{inner}"
            for name, module in self._modules.items()
            for inner, _ in module.named_parameters(remove_duplicate=False)
        }

    def _are_equal(self, buffers: Mapping[str, Tensor]) -> bool:
        sums = self._world.gather(_checksums([*buffers.values()]))
        return all(each == sums[0] for each in sums)


def _whole(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: each for name, each in entries.items() if isinstance(each, Tensor) and not in_pieces(each)}


def _checksums(tensors: list[Tensor]) -> list[int]:
    """Return a number of each tensor that changes with its bits, whatever the order of summation."""
    words = {1: torch.uint8, 2: torch.int16}
    flat = [each.detach().contiguous().reshape(-1) for each in tensors]
    sums = [each.view(words.get(each.element_size(), torch.int32)).sum(dtype=torch.int64) for each in flat]
    numbers: list[int] = torch.stack(sums).tolist() if sums else []
    return numbers
