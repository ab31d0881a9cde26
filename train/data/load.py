"""Load the training and test splits, and the properties of them that a model needs."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from muster.code_location import defined, described, is_own, place
from muster.data.fetch import Fetch, remedy
from muster.data.fingerprint import fingerprint
from muster.data.stream import Stream
from muster.data.weights import weights_of
from muster.errors import ConfigError, DataError
from muster.sample_plan import Weights
from muster.train.config.keys import Config
from muster.train.config.parts import Part, build, callable_of, checked_values, locate, signature
from muster.world.group import World


@dataclass(frozen=True)
class Data:
    """The two splits. Models are built for `num_classes`, if the data has it; `weights` draws the training samples, if it has `sample_weights`."""

    train: Any
    test: Any | None
    num_classes: int | None
    fingerprint: str
    weights: Weights | None = None

    @property
    def shuffles(self) -> bool:
        """True if the plan orders the training samples; a stream has its own order."""
        return not isinstance(self.train, Stream)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The dataset's `input_shape`, or else the shape of the first sample's first input."""
        if shape := getattr(self.train, "input_shape", None):
            return tuple(shape)
        sample = Fetch(self.train, seed=0).sample(0)
        first = pytree.tree_leaves(sample[0] if isinstance(sample, (tuple, list)) else sample)
        try:
            return tuple(torch.as_tensor(first[0]).shape) if first else ()
        except (TypeError, ValueError, RuntimeError) as error:
            where = defined(self.train, "__getitem__", "__iter__")
            raise DataError(
                f"a sample's input is {described(first[0])}{where}, which cannot become a tensor: {remedy(self.train, sample)}"
            ) from error


def load(config: Config, world: World) -> Data:
    """Build both splits. One of the ranks that see the same folder downloads while the others wait. Collective.

    Raises DataError: on every rank, if any rank cannot load the data.
    """
    failure: DataError | None = None
    try:
        train, test = _splits(config, world)
        weights, of_weights = _weights(train)
    except DataError as error:
        failure = error
    except OSError as error:
        failure = DataError(
            f"cannot read {error.filename or config.data.target}: {error.strerror or error}{_where(error)}; {_remedy(config.data, error)}"
        )
    world.together(failure)
    digest = of_weights + fingerprint(train)
    remedy = "give every node the same data, see data.root"
    if isinstance(train, Stream):
        remedy += "; a stream must not divide itself by rank: each rank reads all of it, and keeps its own samples"
    world.same("training data: fingerprint", digest, remedy=remedy)
    return Data(train, test, _num_classes(train), digest, weights)


def _where(error: OSError) -> str:
    where = place(error)
    return f" ({where})" if where and is_own(where.file) else ""


def _remedy(part: Part, error: OSError) -> str:
    """Return advice that names the parameter whose value is a prefix of the file's path, or else `root`; without either, the code."""
    parameters = signature(locate(part))
    values = {name: each.default for name, each in parameters.items()} | part.values
    texts = {name: str(value) for name, value in values.items() if isinstance(value, str | Path) and str(value)}
    found = [name for name, text in texts.items() if str(error.filename).startswith(text)]
    name = next(iter(found), "root" if "root" in parameters else None)
    if name is None:
        return "fix this, or the path to it"
    return f"set {'' if name in part.values else '+'}{part.key}.{name} to where the data is"


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
    if test is not None and not len(test) and config.eval.every_steps != "off":
        raise DataError(f"{config.data.target} has no test samples: give it some, or write eval.every_steps=off")
    return train, test


def _by_position(dataset: Any) -> Any:
    if not isinstance(dataset, IterableDataset):
        for name, arguments in (("__len__", "self"), ("__getitem__", "self, index")):
            if not hasattr(dataset, name):
                raise DataError(
                    f"{described(dataset)} is not a data set: it has no {name}{defined(dataset)}: write `def {name}({arguments})`"
                )
    return Stream(dataset) if isinstance(dataset, IterableDataset) else dataset


def _weights(dataset: Any) -> tuple[Weights | None, str]:
    """Return what draws the samples, and the part of the fingerprint that says so. Raises DataError."""
    given = getattr(dataset, "sample_weights", None)
    if given is None:
        return None, ""
    try:
        weights, digest = weights_of(given, dataset, said=f"sample_weights of the data set{defined(dataset)}")
    except ConfigError as error:
        raise DataError(str(error)) from error
    return weights, f"weights {digest}:"


def _num_classes(dataset: Any) -> int | None:
    """Return `num_classes`, or else the length of `classes`. Raises DataError if it is not a number, or not a list."""
    number, classes = getattr(dataset, "num_classes", None), getattr(dataset, "classes", None)
    if number:
        if isinstance(number, Integral):
            return int(number)
        said, remedy = f"num_classes is {described(number)}", "write self.num_classes = ..., a whole number"
    elif classes is None or isinstance(classes, Sized):
        return len(classes) if classes is not None else None
    else:
        said = f"classes is {classes if isinstance(classes, Integral) else described(classes)}, and a list of names is expected"
        remedy = (
            f"write self.num_classes = {classes if isinstance(classes, Integral) else '...'}, or self.classes = [...]"
        )
    raise DataError(f"the data set's {said}{defined(dataset)}: {remedy}")


def origin_of_samples(config: Config, dataset: Any) -> str:
    """Return where user code makes, collates and splits samples (file and line); empty if no user code does."""
    loader = config.loader
    own = {name: callable_of(f"loader.{name}", getattr(loader, name)) for name in ("collate_fn", "batch")}
    through = [f"loader.{name}{where}" for name, each in own.items() if (where := defined(each, "__call__"))]
    made = defined(dataset, "__getitem__", "__iter__").strip(" ()")
    if not through:
        return made
    return f"{made or config.data.target} through {' and '.join(through)}"
