"""Hybrid sharding: slices within a group of neighbouring ranks, replicas across the groups.

Gathering stays inside a group, which is best a node; across groups only gradient slices are averaged.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from train.config.marks import FREE, Ge
from train.dist.layout import Layout
from train.strategies.fsdp import Fsdp


@dataclass(kw_only=True, eq=False)
class Hybrid(Fsdp):
    """FSDP over groups of `shard` ranks, which are replicas of each other."""

    shard: Annotated[int, Ge(1), FREE]

    def layout(self, world_size: int) -> Layout:
        return Layout.of(world_size, samples_over=("replicate", "shard"), replicate=-1, shard=self.shard)
