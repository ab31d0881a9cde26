"""MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.errors import DataError
from muster.train.data.images import Images, download


class Mnist(Images):
    """MNIST from its IDX files in torchvision's layout, `root`/MNIST/raw, which are downloaded if absent.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
    """

    num_classes = 10
    FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

    def __init__(self, train: bool, *, root: str, augment: bool):
        from torchvision.datasets.mnist import read_image_file, read_label_file

        folder = Path(root) / "MNIST" / "raw"
        names = self.FILES[:2] if train else self.FILES[2:]
        try:
            images, labels = read_image_file(str(folder / names[0])), read_label_file(str(folder / names[1]))
        except (OSError, ValueError, AssertionError, RuntimeError) as error:
            raise DataError(
                f"cannot read {folder}/{names[0]} and {names[1]}: {error}; remove them to download them again"
            ) from error
        if len(images) != len(labels):
            raise DataError(
                f"{folder}: {len(images)} images for {len(labels)} labels in {names}; put matching files there"
            )
        super().__init__(
            images[:, None], labels, mean=[0.1307], std=[0.3081], shift=2 if augment and train else 0, flip=False
        )

    @classmethod
    def prepare(cls, root: str, **_: Any) -> None:
        folder = Path(root) / "MNIST" / "raw"
        if all((folder / name).is_file() for name in cls.FILES):
            return
        from torchvision.datasets import MNIST

        download(lambda: MNIST(root, download=True), f"the files {', '.join(cls.FILES)} (unpacked) in {folder}")
