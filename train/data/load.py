"""The training and the test split, and what a model has to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from train.config.keys import Config
from train.config.parts import build, checked_values, locate, signature
from train.data.fetch import Fetch
from train.data.fingerprint import fingerprint
from train.dist.world import World
from train.errors import DataError


@dataclass(frozen=True)
class Data:
    """Both splits. `input_shape` and `num_classes` are what models are built for, where the data has them."""

    train: Any
    test: Any | None
    input_shape: tuple[int, ...]
    num_classes: int | None
    fingerprint: str


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
    return Data(train, test, _input_shape(train), _num_classes(train), digest)


def _splits(config: Config, world: World) -> tuple[Any, Any | None]:
    target, values = locate(config.data), checked_values(config.data)
    if hasattr(target, "prepare") or values.get("download"):
        with world.local_first(values.get("root")) as goes_first:
            if goes_first:
                target.prepare(**values) if hasattr(target, "prepare") else build(config.data, train=True)
    train = build(config.data, train=True)
    test = build(config.data, train=False) if "train" in signature(target) else None
    if not len(train):
        raise DataError(f"{config.data.target} has no training samples")
    return train, test


def _input_shape(dataset: Any) -> tuple[int, ...]:
    """As the dataset says it, else the shape of the first sample's input."""
    if shape := getattr(dataset, "input_shape", None):
        return tuple(shape)
    first = pytree.tree_leaves(Fetch(dataset, seed=0).sample(0)[0])
    return tuple(torch.as_tensor(first[0]).shape) if first else ()


def _num_classes(dataset: Any) -> int | None:
    return getattr(dataset, "num_classes", None) or (len(dataset.classes) if hasattr(dataset, "classes") else None)
