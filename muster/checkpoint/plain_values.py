"""What a checkpoint holds beside named tensors: numbers, texts and containers of them, in torch.save's format.

It is read with `weights_only=True`. That refuses NumPy's numbers and arrays, whose pickles could be made to run code: an
array is written as a tensor, and a number as one of Python's with its type.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from muster.errors import ConfigError

DICTS, SEQUENCES, SETS, OTHERS = (dict, OrderedDict, Counter), (list, tuple, torch.Size), (set,), (bytearray,)
"""Containers that torch.load gives back with `weights_only=True`."""
NUMPY = "muster.numpy"
"""Key of what stands for NumPy's, or for a container that has such a number as a key or in a set."""
KINDS = {each.__name__: each for each in (*DICTS, *SETS)}
NUMBERS = {
    each.__name__: each
    for each in (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
    + (np.float16, np.float32, np.float64, np.complex64, np.complex128)
}
"""NumPy's numbers that are exact as Python's."""


def host_copy(value: Any) -> Any:
    """Return a deep copy in host memory, so that training can continue while it is written. What no checkpoint holds stays as it is."""
    if isinstance(value, Tensor):
        copied = value.detach().to("cpu", copy=True)
        needs = value.requires_grad and value.is_leaf
        return nn.Parameter(copied, needs) if type(value) is nn.Parameter else copied.requires_grad_(needs)
    return value.copy(order="K") if type(value) is np.ndarray else _copy(value, host_copy)


def dumps(value: Any) -> bytes:
    """Return `value` as `loads` reads it."""
    return _written(_without_numpy(value))


def loads(data: bytes) -> Any:
    """Return what `dumps` was given, its tensors on the CPU. Raises an error of torch.load's for anything else."""
    return _with_numpy(_read(data))


def dumps_plain(value: Any, place: str = "", *, for_torch: bool = False) -> bytes:
    """Return `value` as `loads` reads it, or torch.load alone.

    Raises ConfigError: it would not; it names the first part that is not plain, as `optimizer/groups[0]['lr']`.
    """
    convert = _itself if for_torch else _without_numpy
    if (data := _plain(value, convert)) is not None:
        return data
    arrays = "" if for_torch else "arrays, "
    raise ConfigError(
        f"{next(_strange(value, place, convert), place or 'a value')}, which torch.load does not read with weights_only=True: "
        f"give tensors, {arrays}numbers and texts, in lists and dicts, as dict(value)"
    )


def _itself(value: Any) -> Any:
    return value


def _plain(value: Any, convert: Callable[[Any], Any]) -> bytes | None:
    try:
        data = _written(convert(value))
        _read(data) if convert is _itself else loads(data)
    except MemoryError:
        raise
    except Exception:
        return None
    return data


def _written(value: Any) -> bytes:
    blob = io.BytesIO()
    torch.save(value, blob)
    return blob.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _without_numpy(value: Any) -> Any:
    """Return `value` with tensors and numbers of Python's in place of NumPy's, where they are exact."""
    if NUMBERS.get(name := type(value).__name__) is type(value):
        return {NUMPY: name, "value": value.item()}
    if type(value) is np.ndarray:
        try:
            return {NUMPY: torch.from_numpy(value.copy(order="K"))}
        except TypeError:  # torch has no such dtype
            return value
    if type(value) in KINDS.values() and any(isinstance(each, np.generic) for each in value):
        items = value.items() if isinstance(value, dict) else value
        return {NUMPY: type(value).__name__, "value": [_without_numpy(each) for each in items]}
    return _copy(value, _without_numpy)


def _with_numpy(value: Any) -> Any:
    if not (type(value) is dict and NUMPY in value):
        return _copy(value, _with_numpy)
    kind = value[NUMPY]
    if isinstance(kind, Tensor):
        return kind.numpy()
    if kind in NUMBERS:
        return NUMBERS[kind](value["value"])
    items = _with_numpy(value["value"])
    return KINDS[kind](dict(items) if issubclass(KINDS[kind], dict) else items)


def _copy(value: Any, copy: Callable[[Any], Any]) -> Any:
    kind: Any = type(value)
    if kind in DICTS:
        return kind({key: copy(each) for key, each in value.items()})
    return kind(map(copy, value)) if kind in SEQUENCES else kind(value) if kind in SETS + OTHERS else value


def _strange(value: Any, place: str, convert: Callable[[Any], Any]) -> Iterator[str]:
    """Yield each part of `value` that is not plain, and its type."""
    if type(value) in DICTS + SEQUENCES + SETS:
        items = value.items() if type(value) in DICTS else enumerate(value)
        for key, each in items:
            within = f"{place}[{key!r}]" if place else str(key)
            yield from _strange(each, within, convert)
            if type(key) not in (str, int) and _plain({key: None}, convert) is None:
                yield f"the key of {within} is of type {_name_of(type(key))}"
    elif not isinstance(value, Tensor) and _plain(value, convert) is None:
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        yield f"{place or 'it'} is of type {_name_of(type(value))}{of}"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
