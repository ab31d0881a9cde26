"""CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from muster.errors import DataError
from muster.train.data.images import Images, download


class Cifar10(Images):
    """CIFAR-10 from its Python batches in `root`/cifar-10-batches-py, which are downloaded if absent.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    num_classes = 10
    TRAIN = tuple(f"data_batch_{n}" for n in range(1, 6))
    TEST = ("test_batch",)

    def __init__(self, train: bool, *, root: str, augment: bool):
        folder = Path(root) / "cifar-10-batches-py"
        parts = [read_cifar_batch(folder / name) for name in (self.TRAIN if train else self.TEST)]
        images = torch.cat([images for images, _ in parts])
        labels = torch.cat([labels for _, labels in parts])
        on = augment and train
        super().__init__(
            images, labels, mean=[0.4914, 0.4822, 0.4465], std=[0.247, 0.2435, 0.2616], shift=4 if on else 0, flip=on
        )

    @classmethod
    def prepare(cls, root: str, **_: Any) -> None:
        folder = Path(root) / "cifar-10-batches-py"
        if all((folder / name).is_file() for name in (*cls.TRAIN, *cls.TEST)):
            return
        from torchvision.datasets import CIFAR10

        download(lambda: CIFAR10(root, download=True), f"the unpacked cifar-10-python.tar.gz as {folder}")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and nothing else: a batch is a pickle from the network."""

    ALLOWED: ClassVar = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which no CIFAR batch needs")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read one Python batch: `[N, 3, 32, 32] uint8` images and `[N] int64` labels. Raises DataError on failure."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        return torch.from_numpy(pixels.reshape(len(labels), 3, 32, 32).copy()), torch.from_numpy(
            labels.astype(np.int64)
        )
    except (OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, TypeError) as error:
        raise DataError(f"cannot read {path}: {error}; remove it to download it again") from error
