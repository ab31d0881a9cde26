"""Scanned digits, with scikit-learn: real data without a download."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from muster.train.data.images import Images


class Digits(Images):
    """1797 scanned digits of 8x8 pixels, bundled with scikit-learn: 1437 for training, 360 for testing.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """

    num_classes = 10

    def __init__(self, train: bool, *, augment: bool):
        table = read_digits()
        order = np.random.default_rng(0).permutation(len(table))  # a fixed split: the file is sorted by writer
        chosen = table[order[360:] if train else order[:360]]
        images = torch.from_numpy((chosen[:, :64] * 255 / 16).round().astype(np.uint8)).view(-1, 8, 8)
        super().__init__(
            images[:, None],
            torch.from_numpy(chosen[:, 64]),
            mean=[0.3049],
            std=[0.3757],
            shift=1 if augment and train else 0,
            flip=False,
        )


@cache  # both splits are cut from it
def read_digits() -> np.ndarray:
    """Return scikit-learn's bundled table, `[1797, 65]`: 64 pixels from 0 to 16 and the label.

    The file is read directly, because importing scikit-learn costs every rank a second.
    """
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, "datasets/data/digits.csv.gz")).exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
