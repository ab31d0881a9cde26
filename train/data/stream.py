"""Data that can only be read from its beginning: torch's IterableDataset.

Every rank reads the whole stream and keeps its own samples of each global batch, so that order and samples are the same at
every world size, and a resume goes on at the very sample. What costs too much to be read by all belongs into shards
with an index (shards.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from train.data.fingerprint import LOOKED_AT, hash_of, look
from train.errors import ConfigError, DataError


class Stream:
    """An IterableDataset by position: `seek`, then `take`.

    It has to have a length, the samples of an epoch; `set_epoch(epoch)` is called before each where there is such a
    method. With `state_dict` and `load_state_dict` (torchdata's protocol) a resume begins where its state was taken;
    otherwise it reads what comes before again.

    Raises:
        ConfigError: it has no length.
    """

    def __init__(self, dataset: Any):
        try:
            self._length = len(dataset)
        except TypeError:
            raise ConfigError(
                f"{type(dataset).__name__} is a stream without a length: give it __len__, the number of samples of an epoch"
            ) from None
        self.dataset = dataset
        for name in ("num_classes", "classes", "input_shape"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        self.keeps_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._fresh = dataset.state_dict() if self.keeps_state else None
        self._samples: Iterator[Any] | None = None
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return self._length

    def seek(self, epoch: int, index: int, *, seed: Callable[[int], None] = lambda _: None) -> None:
        """Go to sample `index` of `epoch`, forward where it lies ahead. Raises DataError: the stream ends before it.

        seed: called with each sample's index before it is read, those that are passed over too: a stream that shuffles
            draws there what comes later.
        """
        if self._samples is None or epoch != self._epoch or index < self._position:
            seed(0)
            self._begin(epoch)
        while self._position < index:
            seed(self._position)
            self.take()
        seed(index)

    def take(self) -> Any:
        """The next sample. Raises DataError: there is none."""
        assert self._samples is not None
        try:
            sample = next(self._samples)
        except StopIteration:
            raise DataError(
                f"the stream {type(self.dataset).__name__} ends after {self._position} samples, and its length is {len(self)}"
            ) from None
        self._position += 1
        return sample

    def state(self) -> dict[str, Any]:
        """Where it is, for `load` in another process; empty where the data set does not say."""
        if not self.keeps_state or self._samples is None:
            return {}
        return {"epoch": self._epoch, "position": self._position, "dataset": self.dataset.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.dataset.load_state_dict(state["dataset"])
        self._epoch, self._position = state["epoch"], state["position"]
        self._samples = iter(self.dataset)

    def first(self, number: int = 1) -> list[Any]:
        """Its first samples, from a copy: the stream stays where it is."""
        samples = iter(copy.deepcopy(self.dataset))
        return [sample for sample, _ in zip(samples, range(number), strict=False)]

    def fingerprint(self) -> str:
        if hasattr(self.dataset, "fingerprint"):
            return str(self.dataset.fingerprint())
        return f"{len(self)}:{hash_of(look(sample) for sample in self.first(LOOKED_AT))}"

    def _begin(self, epoch: int) -> None:
        if self._fresh is not None:
            self.dataset.load_state_dict(self._fresh)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._samples, self._epoch, self._position = iter(self.dataset), epoch, 0
