"""Map ranks to a grid of parallel dimensions, from the world size alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.errors import ConfigError

DATA = "data"


@dataclass(frozen=True)
class Layout:
    """A grid of named dimensions over ranks 0 to size - 1; the last dimension varies fastest.

    Neighboring ranks are mostly on one node and form the groups of the last dimension, so put the dimension that
    communicates most last. `samples_over`: the dimensions that divide a global batch; along the others ranks work on the same
    samples.
    """

    sizes: Mapping[str, int]
    samples_over: tuple[str, ...] = (DATA,)

    @classmethod
    def of(cls, world_size: int, *, samples_over: tuple[str, ...] = (DATA,), **sizes: int) -> Layout:
        """Build a layout from `sizes`; one size may be -1, which stands for the rest of `world_size`.

        Raises ConfigError: the sizes do not divide the world size.
        """
        given = math.prod(size for size in sizes.values() if size > 0)
        rest, remainder = divmod(world_size, given)
        if remainder or (rest != 1 and -1 not in sizes.values()):
            said = " x ".join(f"strategy.{name}={size}" for name, size in sizes.items() if size > 0)
            divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            valid = (
                f"use {_either(divisors)}"
                if given == max(sizes.values())
                else f"their product has to be {_either(divisors)}"
            )
            raise ConfigError(f"{said} must divide world size {world_size}: {valid}")
        return cls({name: rest if size == -1 else size for name, size in sizes.items()}, samples_over)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, size in reversed(list(self.sizes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def shard(self, rank: int) -> tuple[int, int]:
        """Return (index, number): which of how many slices of every global batch `rank` gets."""
        at, index, number = self.coordinates(rank), 0, 1
        for name in self.samples_over:
            index, number = index * self.sizes[name] + at[name], number * self.sizes[name]
        return index, number

    def speaks(self, rank: int) -> bool:
        """Whether `rank` is the first of the ranks with the same samples; sums over ranks count only its share."""
        return not any(place for name, place in self.coordinates(rank).items() if name not in self.samples_over)

    def mesh(self, device_type: str) -> Any:
        """Return the grid as torch's DeviceMesh; its groups wait as long as the default group. Collective."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from muster.world import timeouts

        if self.world_size == 1 and not dist.is_initialized():  # a run of one rank has no process group
            form_alone("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", device_type=device_type)
        mesh = init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))
        for name in self.sizes:
            timeouts.set_timeout(mesh.get_group(name))
        return mesh


def form_alone(backend: str, *, device_type: str) -> None:
    """Form a process group of this process only. NCCL then knows its device, and does not guess it by the rank."""
    import torch
    import torch.distributed as dist

    is_on_gpu = device_type == "cuda" and "nccl" in backend
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
