"""The buffers that no module saves (`persistent=False`): a checkpoint has those that training has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muster.checkpoint.tensor_versions import Place, place
from muster.checkpoint.trained import plain
from muster.errors import ConfigError
from muster.job.replicas import bits_of
from muster.world.dtensor import in_pieces

UNSAVED = "buffers"
"""The names of these buffers are below it."""
SPARSE = "{name} is sparse, which no checkpoint holds: keep it in a variable, or register it as a buffer with persistent=False if training does not change it"


@dataclass(frozen=True)
class Built:
    """A buffer as the script has built it: its place (see tensor_versions.py) and a sum of its bits."""

    place: Place
    bits: str


class UnsavedBuffers:
    """The unsaved buffers of tracked modules; those that are in pieces are left out."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = modules
        self._built = {name: Built(place(buffer), bits_of(buffer)) for name, buffer in self._present()}
        self._changed: set[str] = set()

    @property
    def exist(self) -> bool:
        return bool(self._places())

    def changed(self, *, by_data: bool = False) -> dict[str, Tensor]:
        """Return the buffers that are not as they were built: the script alone gives the others.

        by_data: look for those that were changed by `.data`, too, which takes a look at all values.
        Raises ConfigError: a buffer that has changed is sparse.
        """
        present = dict(self._present())
        for name in present.keys() - self._changed:
            before, buffer = self._built.get(name), present[name]
            is_same = not by_data and before and before.place == place(buffer)
            if before is None or (not is_same and bits_of(buffer) != before.bits):
                if buffer.layout != torch.strided:
                    raise ConfigError(SPARSE.format(name=f"{name.removeprefix(UNSAVED)[1:]} has changed, and"))
                self._changed.add(name)
        return {name: buffer for name, buffer in present.items() if name in self._changed}

    def add_changed(self, names: Iterable[str]) -> None:
        """Take buffers as changed, as those of another rank are."""
        self._changed.update(names)

    def load(self, values: Mapping[str, Any], device: torch.device) -> None:
        """Set the buffers to `values`, in place where shape and dtype are the same; ignore those not here."""
        for name, (buffers, key) in self._places().items():
            if (value := values.get(name.removeprefix(f"{UNSAVED}/"))) is None:
                continue
            self._changed.add(name)
            if (own := buffers[key]) is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    own.copy_(value)
            else:  # a forward pass had made it
                buffers[key] = value.clone().to(device)

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        for name, (buffers, key) in self._places().items():
            if (buffer := buffers[key]) is not None:
                yield name, buffer.detach()

    def _places(self) -> dict[str, tuple[dict[str, Tensor | None], str]]:
        """Return the place in a module of each buffer, by name."""
        return {
            f"{UNSAVED}/{name}/{plain(f'{path}.{key}' if path else key)}": (module._buffers, key)
            for name, root in self._modules.items()
            for path, module in root.named_modules()
            for key in module._non_persistent_buffers_set
            if not in_pieces(module._buffers[key])
        }
