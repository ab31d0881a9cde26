"""The micro-batches of a run, loaded as its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from muster.data.fetch import Fetch
from muster.data.generators import kept_generators
from muster.data.loader import Batch, LoaderConfig, batches
from muster.data.stream import Stream
from muster.sample_plan import MicroBatch, Plan, Share
from muster.train.config.keys import BadSample, Config
from muster.train.config.parts import callable_of


def loader_config(config: Config, *, shard: tuple[int, int], device: torch.device, train: bool = True) -> LoaderConfig:
    """Return how samples are fetched for the rank whose slice of every global batch is `shard`, (index, number).

    `train`: the batches are for training; a user's functions may take it as a parameter.
    """
    share = Share(*shard, micro_batch_size=config.micro_batch_size, slices=config.virtual_world_size)
    loader = config.loader
    max_bad = loader.max_bad_samples if loader.on_bad_sample is BadSample.skip else None
    collate = callable_of("loader.collate_fn", loader.collate_fn, train=train)
    adapter = callable_of("loader.batch", loader.batch, train=train)
    how: dict[str, Any] = {"max_bad": max_bad, "replaces_bad": train, "collate": collate, "adapter": adapter}
    return LoaderConfig(share, device, config.seed, loader.num_workers, **how)


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
    """Yield this rank's micro-batches of each of `steps`; see `loader_config`.

    `shard`: None on a rank that takes no samples; its lists are empty.
    """
    if shard is None:
        return iter([] for _ in steps)
    return batches(dataset, plan, steps, loader_config(config, shard=shard, device=device, train=train))


def first_inputs(config: Config, dataset: Any, *, size: int) -> Any:
    """Return the model's inputs for the first `size` samples of `dataset`, as evaluation batches have them, on the CPU.

    The global generators and a stream's position do not change. Raises DataError, and what a user's code raises.
    """
    how = loader_config(config, shard=(0, 1), device=torch.device("cpu"), train=False)
    with kept_generators():
        samples = dataset.first(size) if isinstance(dataset, Stream) else dataset
        fetch = Fetch(samples, seed=config.seed, collate=how.collate, adapter=how.adapter)
        indices = np.arange(min(size, len(samples)))
        return fetch.__getitems__(MicroBatch(0, indices, len(indices)))[0]
