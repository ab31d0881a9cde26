"""The micro-batches of a run, loaded as its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from muster.batches.loader import Batch, LoaderConfig, batches
from muster.plan import Plan, Share
from muster.train.config.keys import BadSample, Config
from muster.train.config.parts import callable_of


def loader_config(config: Config, *, shard: tuple[int, int], device: torch.device, train: bool = True) -> LoaderConfig:
    """Return how samples are fetched for the rank whose slice of every global batch is `shard`, (index, number).

    train: True if the batches are for training; a user's functions may take it as a parameter.
    """
    share = Share(*shard, micro_batch_size=config.micro_batch_size, slices=config.virtual_world_size)
    loader = config.loader
    max_bad = loader.max_bad_samples if loader.on_bad_sample is BadSample.skip else None
    collate = callable_of("loader.collate_fn", loader.collate_fn, train=train)
    adapter = callable_of("loader.batch", loader.batch, train=train)
    return LoaderConfig(share, device, config.seed, loader.num_workers, max_bad, collate, adapter)


def micro_batches(
    config: Config,
    dataset: Any,
    plan: Plan,
    steps: range,
    *,
    shard: tuple[int, int] | None,
    device: torch.device,
    train: bool = True,
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each of `steps`, as the config says; see `loader_config`.

    shard: None on a rank that takes no samples; its lists are empty.
    """
    if shard is None:
        return iter([] for _ in steps)
    return batches(dataset, plan, steps, loader_config(config, shard=shard, device=device, train=train))
