"""Hybrid sharding: slices within a group of neighbouring ranks, replicas across the groups.

Gathering stays inside a group, which is best a node; across groups only gradient slices are averaged.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from train.config.marks import FREE, Ge
from train.dist.layout import Layout
from train.strategies.fsdp import Fsdp


class Hybrid(Fsdp):
    """FSDP over groups of `shard` ranks, which are replicas of each other."""

    def __init__(
        self,
        *,
        shard: Annotated[int, Ge(1), FREE],
        units: Sequence[str] | None,
        param_dtype: Literal["bf16"] | None,
        reshard_after_forward: Annotated[bool, FREE],
        activation_checkpointing: Annotated[bool, FREE],
        cpu_offload: Annotated[bool, FREE],
    ):
        super().__init__(
            units=units,
            param_dtype=param_dtype,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
        )
        self.group_size = shard

    def layout(self, world_size: int) -> Layout:
        return Layout.of(world_size, samples_over=("replicate", "shard"), replicate=-1, shard=self.group_size)
