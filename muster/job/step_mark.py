"""Tells what has changed since a step ended, of what a checkpoint holds and no optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from muster.checkpoint.tensor_versions import place
from muster.checkpoint.trained import plain


class StepMark:
    """Remembers places of tensors, and counts of schedules. Other states are left out: to ask for one in each step may take long.

    followers: parameters that no optimizer steps, as of an average, by name. modules, others: the tracked objects by name. A module's
    buffers are followed by their places in it: it may assign new ones.
    """

    def __init__(self, followers: Mapping[str, Tensor], modules: Mapping[str, nn.Module], others: Mapping[str, Any]):
        self._followers = followers
        self._schedules = {name: each for name, each in others.items() if isinstance(each, LRScheduler)}
        self._buffers = {
            f"{name}/{plain(f'{path}.{key}'.lstrip('.'))}": (module._buffers, key)
            for name, root in modules.items()
            for path, module in root.named_modules()
            for key in module._buffers
        }
        self._marked = dict[str, Any]()

    def set(self) -> None:
        """Note that all is that of the last step."""
        self._marked = self._now()

    def changed(self, *, tensors: bool = False) -> str:
        """Return the first that is not as it was at the mark; empty if all is. tensors: leave schedules out."""
        left_out = self._schedules if tensors else ()
        found = (
            name for name, state in self._now().items() if name not in left_out and self._marked.get(name) != state
        )
        return next(found, "")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what changes in this context, as in an evaluation, which puts in rank 0's buffers and takes them out again."""
        before = self._now()
        try:
            yield
        finally:
            now = self._now()
            self._marked |= {name: now[name] for name in now if self._marked.get(name) == before.get(name)}

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: place(each) for name, each in self._followers.items()}
        for name, (buffers, key) in self._buffers.items():
            found[name] = None if (buffer := buffers.get(key)) is None else (id(buffer), place(buffer))
        return found | {name: _counts(each) for name, each in self._schedules.items()}


def _counts(schedule: LRScheduler) -> list[int | None]:
    """Return its count, and those of its parts: a ChainedScheduler has none itself."""
    return [getattr(each, "last_epoch", None) for each in (schedule, *getattr(schedule, "_schedulers", ()))]
