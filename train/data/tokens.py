"""Language modeling on tokenized files, read by memory map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from muster.data.fingerprint import hash_of
from muster.errors import DataError
from muster.sample_plan import Keys

LOOKED_AT = 1 << 20
"""Number of tokens at the beginning of each file that are checked when it is opened; the others when they are read."""
BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Number and size of the blocks of each file that its fingerprint reads."""


class Tokens:
    """Windows of `block_size` tokens of `root`/train.bin or of `root`/train/*.bin, in order of name; val likewise.

    A file holds token ids of type `dtype` in little-endian order and nothing else, as nanoGPT's data scripts write it. Sample i of
    a file is its tokens from iT up to, not including, iT + T, where T is `block_size`: `[T] int64`; the target is the same shifted
    by one. Files are mapped: they may be larger than the memory. Without val files the test split is empty.

    `vocab_size`: number of different tokens, for which the model is built. `dtype`: NumPy's name of the type of a token, `uint32`
    for more than 65,536 different ones.
    Raises DataError: a file is missing, cut short or too short for a window, or has a token that is not below `vocab_size`.

    Source: https://github.com/karpathy/nanoGPT/tree/master/data/openwebtext
    """

    def __init__(
        self,
        train: bool,
        *,
        root: str,
        block_size: Annotated[int, Ge(1)],
        vocab_size: Annotated[int, Ge(1)],
        dtype: Literal["uint16", "uint32"],
    ):
        self.dtype, self.block_size, self.num_classes, self.input_shape = dtype, block_size, vocab_size, (block_size,)
        self.tokens_per_sample = block_size
        self.files = files_of(Path(root), "train" if train else "val")
        if train and not self.files:
            raise DataError(f"there is no {root}/train.bin and no {root}/train/*.bin: write one, or set data.root")
        sizes = [self._size(file) for file in self.files]
        self._ends = np.cumsum([(size - 1) // block_size for size in sizes], dtype=np.int64)
        self._maps: dict[int, np.ndarray] = {}
        for number in range(len(self.files)):
            self._check(self._map(number)[:LOOKED_AT], number, 0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(np.stack([self._window(index) for index in indices]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def fingerprint(self) -> str:
        return f"{len(self)}:{hash_of(part for file in self.files for part in _looks(file))}"

    def _window(self, index: int) -> np.ndarray:
        """Return sample `index` with the token after it: `[T + 1] int64`."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[number - 1]) if number else 0)) * self.block_size
        tokens = self._map(number)[start : start + self.block_size + 1]
        self._check(tokens, number, start)
        return tokens.astype(np.int64)

    def _check(self, tokens: np.ndarray, number: int, start: int) -> None:
        """Raise DataError for a token beyond the vocabulary: the model's embedding would be read out of bounds."""
        if (largest := int(tokens.max())) >= self.num_classes:
            raise DataError(
                f"{self.files[number]}: token {start + int(tokens.argmax())} is {largest}, and data.vocab_size={self.num_classes} "
                "allows less: set data.vocab_size to that of the tokenizer, and data.dtype to the file's"
            )

    def _size(self, file: Path) -> int:
        """Return the number of tokens in `file`. Raises DataError if they are no whole number, or too few."""
        try:
            size, each = file.stat().st_size, np.dtype(self.dtype).itemsize
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}; set data.root to where the data is") from error
        if size % each:
            raise DataError(
                f"{file} has {size} bytes, which are no whole number of {self.dtype} tokens: it is cut short, or set data.dtype"
            )
        if size // each <= self.block_size:
            raise DataError(
                f"{file} has {size // each} tokens, and a sample takes {self.block_size + 1}: lower data.block_size, or give more text"
            )
        return size // each

    def _map(self, number: int) -> np.ndarray:
        if number not in self._maps:
            self._maps[number] = np.memmap(self.files[number], dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        return self._maps[number]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_maps": {},
        }  # each worker maps the files itself; a map would be pickled as its content


def files_of(root: Path, split: str) -> list[Path]:
    single = root / f"{split}.bin"
    return [single] if single.is_file() else sorted((root / split).glob("*.bin"))


def _looks(file: Path) -> list[Any]:
    """Return the size of `file` and `BLOCKS` blocks of it, spread from the first to the last."""
    size, looks = file.stat().st_size, list[Any]()
    last = max(0, size - BLOCK_BYTES)
    with file.open("rb") as opened:
        for at in dict.fromkeys(last * number // (BLOCKS - 1) for number in range(BLOCKS)):
            looks.append(os.pread(opened.fileno(), BLOCK_BYTES, at))
    return [size, *looks]
