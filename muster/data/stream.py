"""Data that can only be read from its beginning: torch's IterableDataset.

Every rank reads the whole stream and keeps its own samples of each global batch, so that order and samples are the same
at every world size, and a resume continues at the exact sample. Data that is too expensive for every rank to read
belongs in shards with an index (shards.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from muster.code_location import defined
from muster.data.fingerprint import DRAWN, LOOKED_AT, hash_of, look
from muster.data.generators import kept_generators, seed_generators
from muster.data.own_generators import OwnGenerators
from muster.errors import ConfigError, DataError


class Stream:
    """Reads an IterableDataset by position: `seek`, then `take`.

    The dataset must have a length, the number of samples of an epoch. Its `set_epoch(epoch)`, if it exists, is called
    before each epoch. With `state_dict` and `load_state_dict` (torchdata's protocol) a resume continues from the saved
    state; otherwise it rereads the samples before it. Raises ConfigError: the dataset has no length.
    """

    def __init__(self, dataset: Any):
        try:
            self._length = len(dataset)
        except TypeError:
            raise ConfigError(
                f"{type(dataset).__name__} is a stream without a length: give it __len__, the number of samples of an epoch"
            ) from None
        self.dataset = dataset
        for name in ("num_classes", "classes", "input_shape", "sample_weights", "tokens_per_sample"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        self.keeps_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._fresh = dataset.state_dict() if self.keeps_state else None
        self._samples: Iterator[Any] | None = None
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return self._length

    def seek(self, epoch: int, index: int, *, seed: Callable[[int], None] = lambda _: None) -> None:
        """Go to sample `index` of `epoch`, forward if it lies ahead, else from the beginning of the epoch.

        `seed` is called with each sample's index before it is read, also for skipped samples: a stream that shuffles draws later
        samples there. Raises DataError: the stream ends before the sample.
        """
        if self._samples is None or epoch != self._epoch or index < self._position:
            seed(0)
            self._begin(epoch)
        while self._position < index:
            seed(self._position)
            self.take()
        seed(index)

    def take(self) -> Any:
        """Return the next sample. Raises DataError if there is none."""
        assert self._samples is not None
        try:
            sample = next(self._samples)
        except StopIteration:
            raise DataError(
                f"the stream {type(self.dataset).__name__} ends after {self._position} samples, and its length is {len(self)}"
            ) from None
        self._position += 1
        return sample

    def refuse_surplus(self) -> None:
        """Raise DataError if the stream goes on after the last sample of the epoch: the others would never be read."""
        if self._samples is None or self._position < len(self):
            return
        try:
            next(self._samples)
        except Exception:  # an end, too: of a stream that reads past its samples
            return
        raise DataError(
            f"the stream {type(self.dataset).__name__} goes on after {len(self)} samples, which is its length, and what follows would never "
            f"be read{defined(self.dataset, '__iter__')}: let __len__ return the number of all, or end it there: "
            "yield from itertools.islice(..., len(self))"
        )

    def state(self) -> dict[str, Any]:
        """Return the position, for `load` in another process; empty if the dataset keeps no state."""
        if not self.keeps_state or self._samples is None:
            return {}
        return {"epoch": self._epoch, "position": self._position, "dataset": self.dataset.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._epoch, self._position = state["epoch"], state["position"]
        self._samples = iter(self.dataset)

    def first(self, number: int = 1) -> list[Any]:
        """Return the first samples, read from a copy: the stream and the global generators do not change."""
        with kept_generators():
            seed_generators(0)
            dataset = copy.deepcopy(self.dataset)
            OwnGenerators(dataset).seed(0)
            samples = iter(dataset)
            return [sample for sample, _ in zip(samples, range(number), strict=False)]

    def fingerprint(self) -> str:
        """Return the dataset's own `fingerprint()`, or its length and a hash of its first samples."""
        if hasattr(self.dataset, "fingerprint"):
            return str(self.dataset.fingerprint())
        once, again = ([look(sample) for sample in self.first(LOOKED_AT)] for _ in range(2))
        return f"{len(self)}:{hash_of(once) if once == again else DRAWN}"

    def _begin(self, epoch: int) -> None:
        if self._fresh is not None:
            self.dataset.load_state_dict(self._fresh)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._samples, self._epoch, self._position = iter(self.dataset), epoch, 0


def read_whole() -> None:
    """Hide this DataLoader worker from a stream, which would divide itself by workers: each reads the whole stream for its batches.

    Raises ConfigError: this torch keeps the worker's info elsewhere.
    """
    worker._worker_info = None
    if get_worker_info() is not None:
        raise ConfigError(
            "loader.num_workers: this torch lets no worker read a whole stream: write loader.num_workers=0"
        )
