"""The training and the test split, and what a model has to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from train.config.keys import Config
from train.config.parts import build, checked_values, locate, signature
from train.data.fetch import Fetch
from train.data.fingerprint import fingerprint
from train.data.stream import Stream
from train.dist.world import World
from train.errors import DataError


@dataclass(frozen=True)
class Data:
    """Both splits. `num_classes` is what models are built for, where the data has it."""

    train: Any
    test: Any | None
    num_classes: int | None
    fingerprint: str

    @property
    def shuffles(self) -> bool:
        """Whether training samples come in an order of the plan's; a stream has its own."""
        return not isinstance(self.train, Stream)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """As the dataset says it, else the shape of the first sample's first input."""
        if shape := getattr(self.train, "input_shape", None):
            return tuple(shape)
        sample = Fetch(self.train, seed=0).sample(0)
        first = pytree.tree_leaves(sample[0] if isinstance(sample, (tuple, list)) else sample)
        return tuple(torch.as_tensor(first[0]).shape) if first else ()


def load(config: Config, world: World) -> Data:
    """Build both splits; one rank of those that see the same folder downloads while the others wait. Collective.

    Raises:
        DataError: on every rank, if the data cannot be had on any.
    """
    failure: DataError | None = None
    try:
        train, test = _splits(config, world)
    except DataError as error:
        failure = error
    except OSError as error:
        failure = DataError(
            f"cannot read {error.filename or config.data.target}: {error.strerror or error}; set data.root to where the data is"
        )
    world.together(failure)
    digest = fingerprint(train)
    world.same("training data: fingerprint", digest, remedy="give every node the same data, see data.root")
    return Data(train, test, _num_classes(train), digest)


def _splits(config: Config, world: World) -> tuple[Any, Any | None]:
    target, values = locate(config.data), checked_values(config.data)
    if hasattr(target, "prepare") or values.get("download"):
        with world.local_first(values.get("root")) as goes_first:
            if goes_first:
                target.prepare(**values) if hasattr(target, "prepare") else build(config.data, train=True)
    train = _by_position(build(config.data, train=True))
    test = _by_position(build(config.data, train=False)) if "train" in signature(target) else None
    if not len(train):
        raise DataError(f"{config.data.target} has no training samples")
    return train, test


def _by_position(dataset: Any) -> Any:
    return Stream(dataset) if isinstance(dataset, IterableDataset) else dataset


def _num_classes(dataset: Any) -> int | None:
    return getattr(dataset, "num_classes", None) or (len(dataset.classes) if hasattr(dataset, "classes") else None)
