"""model.pt: the finished weights in one file that plain torch.load reads, whatever the layout they were trained in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.checkpoint.state import as_bytes, host_copy
from train.errors import MusterError, storage_error
from train.files import replace_file


def write_weights(path: Path, weights: Mapping[str, Any], *, writes: bool) -> MusterError | None:
    """Write `weights` to `path` on the rank that `writes`; what kept it from doing so. Collective.

    Those in pieces are made whole one at a time, and wait in a file: no rank ever holds two of them.
    """
    spill = path.with_name(f".{path.name}.sharded")
    failure: MusterError | None = None
    whole: dict[str, Any] = {}
    for name, value in weights.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value() if callable(value) else value
        if writes and not failure:
            try:
                whole[name] = host_copy(full) if full is value else _spilled(spill, full)
            except (OSError, RuntimeError) as error:
                failure = storage_error(f"write {spill}:", error if isinstance(error, OSError) else OSError(str(error)))
        del full  # else it would still be there while the next one is made whole
    if writes and not failure:
        try:
            replace_file(path, lambda draft: _save(whole, draft))
        except MusterError as error:
            failure = error
    return failure


def _save(whole: dict[str, Any], draft: Path) -> None:
    """Through a stream: torch writes the name of a path into the file, and equal weights shall be equal files."""
    with draft.open("wb") as file:
        torch.save(whole, file)


def _spilled(path: Path, tensor: Tensor) -> Tensor:
    """The same tensor, whose bytes lie in a file that has no name any more and not in memory."""
    if not tensor.numel():
        return tensor.cpu()
    try:
        path.write_bytes(as_bytes(tensor.detach().cpu()))
        mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    finally:
        path.unlink(missing_ok=True)
    return mapped.view(tensor.dtype).view(tensor.shape)
