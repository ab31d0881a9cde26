"""Digests of what a checkpoint holds, to compare the values of several ranks without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muster.checkpoint.plain_values import host_copy
from muster.tensor_bytes import as_bytes
from muster.world.group import World


def digest_of(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        each = tensor.detach().resolve_conj().resolve_neg()
        sparse = None if each.layout == torch.strided else each.to_sparse(layout=torch.sparse_coo).coalesce()
        for part in (each,) if sparse is None else (sparse.indices(), sparse.values()):
            digest.update(as_bytes(host_copy(part)))
    return digest.hexdigest()


def digest_of_value(value: Any) -> str:
    """Return a digest of a plain value, as a checkpoint holds it: of each part's type, size and content."""
    digest = hashlib.sha256()
    for each in _contents(value):
        digest.update(each)
    return digest.hexdigest()


def differing(values: Mapping[str, Any], world: World) -> dict[str, bool]:
    """Return the names of the values that some ranks have otherwise, or not at all, and whether all have one. Collective."""
    several = world.size > 1
    digests = world.gather({name: digest_of_value(each) if several else "" for name, each in values.items()})
    found = {name: {of_rank.get(name, "") for of_rank in digests} for of_rank in digests for name in of_rank}
    return {name: "" not in different for name, different in found.items() if len(different) > 1}


def _contents(value: Any) -> Iterator[Any]:
    """Yield bytes that are the same for values that are read back alike, and for no others."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        yield f"{kind} {value.dtype} {value.requires_grad} {[*value.shape]} {digest_of([value])}".encode()
    elif isinstance(value, np.ndarray):
        yield f"{kind} {value.dtype} {value.shape} ".encode()
        is_number = value.dtype.kind in "biufc"  # a checkpoint holds no others
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8) if is_number else repr(value).encode()
    elif isinstance(value, dict | list | tuple):
        if type(value) is dict:  # in any order, as of what a set has given
            value = dict(sorted(value.items(), key=lambda item: repr(item[0])))
        parts = [part for item in value.items() for part in item] if isinstance(value, dict) else value
        yield f"{kind} {len(parts)} ".encode()
        for part in parts:
            yield from _contents(part)
    else:
        text = " ".join(sorted(map(repr, value))) if isinstance(value, set) else repr(value)
        yield f"{kind} {len(text)} {text}".encode()
