"""Byte-level language modeling on any text files."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muster.data.fingerprint import hash_of
from muster.errors import DataError
from muster.sample_plan import Keys


class Text:
    """Windows of `block_size` bytes of all files under `root` that match `pattern`, in order of name.

    If `root` is None, the files are the sources of Python's standard library. Every tenth window is a test sample. A
    sample is `[T] int64` bytes; its target is the same shifted by one.
    """

    num_classes = 256

    def __init__(self, train: bool, *, root: str | None, pattern: str, block_size: int):
        folder = Path(root) if root else Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests"} if root is None else set()
        files = sorted(
            p for p in folder.glob(pattern) if p.is_file() and not skipped & set(p.relative_to(folder).parts)
        )
        if not files:
            raise DataError(f"no file under {folder.resolve()} matches {pattern}: set data.root and data.pattern")
        try:
            self.bytes = np.concatenate([np.fromfile(path, dtype=np.uint8) for path in files])
        except OSError as error:
            raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
        windows = np.arange((len(self.bytes) - 1) // block_size)
        self.starts = windows[windows % 10 != 9 if train else windows % 10 == 9] * block_size
        self.block_size, self.tokens_per_sample, self.input_shape = block_size, block_size, (block_size,)
        if not len(self.starts):
            raise DataError(
                f"{len(self.bytes)} bytes under {folder.resolve()} make too few windows of {block_size}: lower data.block_size"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        positions = self.starts[np.asarray(indices)][:, None] + np.arange(self.block_size + 1)
        windows = torch.from_numpy(self.bytes[positions].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def fingerprint(self) -> str:
        return f"{len(self.bytes)}:{hash_of([self.bytes.tobytes()]) if len(self.bytes) < 1 << 28 else ''}"
