"""Split a collated batch into the model's inputs and the objective's targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muster.code_location import defined, described
from muster.errors import DataError

TARGETS = ("labels", "label", "targets", "target")


def split(
    batch: Any, adapter: Callable[[Any], Any] | None, *, source: Any = None, collate: Callable[[Any], Any] | None = None
) -> tuple[Any, Any]:
    """Return (inputs, targets) of a collated batch.

    An `adapter` (loader.batch) returns the pair itself. Without one, a pair is returned as is. For a dict, the inputs are the
    whole dict, so that a model whose forward has a parameter `labels` gets them, too; the targets are its entry `labels`,
    `label`, `targets` or `target`, else the whole dict. `source`, `collate`: the dataset and a user's function, for messages.

    Raises DataError: the batch is neither a pair nor a dict and there is no adapter, or a user's function returns no pair.
    """
    if batch is None and collate:
        raise DataError(f"loader.collate_fn returns None{defined(collate)}: write `return ...` as its last line")
    if adapter:
        given = adapter(batch)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise DataError(
                f"loader.batch must return a pair (inputs, targets), but it returns {_name(given)}{defined(adapter)}: "
                "write `return inputs, targets`"
            )
        return given[0], given[1]
    if isinstance(batch, Mapping):
        found = [name for name in TARGETS if name in batch]
        return batch, batch[found[0]] if found else batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        given = f"the data gives {_name(batch)}{defined(source, '__getitem__', '__iter__')}"
        if collate:
            given = f"loader.collate_fn returns {_name(batch)}{defined(collate)}"
        raise DataError(
            f"a {'batch' if collate else 'sample'} must be a pair (input, target) or a dict, and {given}: "
            "convert it with loader.batch=package.module.function, which turns a batch into (inputs, targets)"
        )
    return batch[0], batch[1]


def _name(value: Any) -> str:
    return f"{len(value)} parts" if isinstance(value, (tuple, list)) else described(value)
