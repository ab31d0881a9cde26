"""Hybrid sharding: parameters are sharded within a group of neighboring ranks and replicated across the groups.

All-gathers stay within a group, ideally one node; across groups only gradient shards are averaged.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from muster.train.config.constraints import FREE, Ge
from muster.train.strategies.fsdp import Fsdp
from muster.world.layout import Layout


@dataclass(kw_only=True, eq=False)
class Hybrid(Fsdp):
    """FSDP within groups of `shard` ranks; the groups are replicas of each other."""

    shard: Annotated[int, Ge(1), FREE]

    def layout(self, world_size: int) -> Layout:
        """A grid of `replicate` x `shard`; samples are divided along both dimensions."""
        return Layout.of(world_size, samples_over=("replicate", "shard"), replicate=-1, shard=self.shard)
