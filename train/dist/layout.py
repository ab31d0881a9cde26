"""Which rank is which part of what: a grid over all ranks, known from the world size alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.errors import ConfigError

DATA = "data"


@dataclass(frozen=True)
class Layout:
    """A grid of named dimensions over ranks 0 to size - 1, of which the last one varies fastest.

    Neighbouring ranks, which are mostly on one node, so share what comes last: put there what talks most.

    sizes: ranks along each dimension, in order.
    samples_over: the dimensions along which a global batch is divided; along the others ranks work on the same samples.
    """

    sizes: Mapping[str, int]
    samples_over: tuple[str, ...] = (DATA,)

    @classmethod
    def of(cls, world_size: int, *, samples_over: tuple[str, ...] = (DATA,), **sizes: int) -> Layout:
        """The given `sizes`, where -1, at most once, stands for what is left of `world_size`.

        Raises:
            ConfigError: they do not divide it.
        """
        given = math.prod(size for size in sizes.values() if size > 0)
        rest, remainder = divmod(world_size, given)
        if remainder or (rest != 1 and -1 not in sizes.values()):
            said = " x ".join(f"strategy.{name}={size}" for name, size in sizes.items() if size > 0)
            divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            valid = f"use {_either(divisors)}" if given == max(sizes.values()) else f"their product has to be {_either(divisors)}"
            raise ConfigError(f"{said} must divide world size {world_size}: {valid}")
        return cls({name: rest if size == -1 else size for name, size in sizes.items()}, samples_over)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along each dimension."""
        found: dict[str, int] = {}
        for name, size in reversed(list(self.sizes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def shard(self, rank: int) -> tuple[int, int]:
        """(index, number) of the rank's slice of every global batch."""
        at, index, number = self.coordinates(rank), 0, 1
        for name in self.samples_over:
            index, number = index * self.sizes[name] + at[name], number * self.sizes[name]
        return index, number

    def speaks(self, rank: int) -> bool:
        """Whether it is the first of those that work on the same samples: sums over ranks count its share alone."""
        return not any(place for name, place in self.coordinates(rank).items() if name not in self.samples_over)

    def mesh(self, device_type: str) -> Any:
        """The grid as torch's DeviceMesh, of the dimensions' names. Collective."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if self.world_size == 1 and not dist.is_initialized():  # a run of one rank has no process group
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
