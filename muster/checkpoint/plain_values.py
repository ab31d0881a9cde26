"""What a checkpoint holds beside named tensors: numbers, texts and containers of them, in torch.save's format.

It is read with `weights_only=True`. That refuses NumPy's numbers and arrays, whose pickles could be made to run code, so
they are written as tensors.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muster.errors import ConfigError

DICTS, SEQUENCES, OTHERS = (dict, OrderedDict, Counter), (list, tuple, torch.Size), (set, bytearray)
"""Containers that torch.load gives back with `weights_only=True`."""
NUMPY = "muster.numpy"
"""Key of the tensor that stands for a number or an array of NumPy's."""


def host_copy(value: Any) -> Any:
    """Return a deep copy in host memory, so that training can continue while it is written. What no checkpoint holds stays as it is."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if type(value) is np.ndarray else _copy(value, host_copy)


def dumps(value: Any) -> bytes:
    """Return `value` as `loads` reads it."""
    blob = io.BytesIO()
    torch.save(without_numpy(value), blob)
    return blob.getvalue()


def loads(data: bytes) -> Any:
    """Return what `dumps` was given, its tensors on the CPU. Raises an error of torch.load's for anything else."""
    return _with_numpy(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def dumps_plain(value: Any) -> bytes | None:
    """Return `value` as `loads` reads it; None if it would not."""
    try:
        data = dumps(value)
        loads(data)
    except MemoryError:
        raise
    except Exception:
        return None
    return data


def is_plain(value: Any) -> bool:
    """Return whether `value` can be read from a checkpoint."""
    return dumps_plain(value) is not None


def not_plain(value: Any, place: str = "") -> ConfigError:
    """Return the error that names the first part of `value` that is not plain, as `optimizer/groups[0]['lr']`."""
    return ConfigError(
        f"{next(_strange(value, place), place or 'a value')}, which torch.load does not read with weights_only=True: "
        "give tensors, arrays, numbers and texts, in lists and dicts, as dict(value)"
    )


def without_numpy(value: Any) -> Any:
    """Return `value` with a tensor in place of each number and array of NumPy's, where torch has its dtype."""
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        try:
            return {NUMPY: torch.from_numpy(np.array(value)), "is_number": isinstance(value, np.generic)}
        except TypeError:  # torch has no such dtype
            return value
    return _copy(value, without_numpy)


def _with_numpy(value: Any) -> Any:
    if type(value) is dict and NUMPY in value:
        array = value[NUMPY].numpy()
        return array[()] if value["is_number"] else array
    return _copy(value, _with_numpy)


def _copy(value: Any, copy: Callable[[Any], Any]) -> Any:
    kind: Any = type(value)
    if kind in DICTS:
        return kind({key: copy(each) for key, each in value.items()})
    return kind(map(copy, value)) if kind in SEQUENCES else kind(value) if kind in OTHERS else value


def _strange(value: Any, place: str = "") -> Iterator[str]:
    if type(value) in DICTS + SEQUENCES:
        items = value.items() if type(value) in DICTS else enumerate(value)
        for key, each in items:
            within = f"{place}[{key!r}]" if place else str(key)
            yield from _strange(each, within)
            if not is_plain({key: None}):
                yield f"the key of {within} is of type {_name_of(type(key))}"
    elif not isinstance(value, Tensor) and not is_plain(value):
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        yield f"{place or 'it'} is of type {_name_of(type(value))}{of}"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
