"""Image classification: digits (bundled), MNIST, CIFAR-10 and folders of pictures."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from train.errors import DataError
from train.plan import Keys, mix


class Images:
    """Images held in memory as `[N, C, H, W] uint8`, gathered and normalised a micro-batch at a time."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float], shift: int, flip: bool
    ):
        self.images, self.labels = images, labels.long()
        self.scale = (1 / (255 * torch.tensor(std))).view(1, -1, 1, 1)
        self.offset = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1)
        self.shift, self.flip = shift, flip
        self.input_shape = tuple(images.shape[1:])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`[B, C, H, W] float32` normalised images and `[B] int64` labels."""
        chosen = torch.as_tensor(indices)
        return torch.addcmul(self.offset, self.images[chosen].float(), self.scale), self.labels[chosen]

    def augment(self, batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
        """Shift by up to `shift` pixels and flip, each sample by its own key."""
        if not self.shift and not self.flip:
            return batch
        images, labels = batch
        return shift_and_flip(images, keys, shift=self.shift, flip=self.flip, fill=self.offset), labels


def shift_and_flip(images: Tensor, keys: Keys, *, shift: int, flip: bool, fill: Tensor) -> Tensor:
    """A crop at a random offset out of the padded image, then a horizontal flip of every second: `[B, C, H, W]`.

    The crop and flip of Krizhevsky's CIFAR nets and of He et al., "Deep Residual Learning", 2015, section 4.2.
    """
    count, channels, height, width = images.shape
    span = np.uint64(2 * shift + 1)
    down = torch.from_numpy((mix(keys) % span).astype(np.int64))
    right = torch.from_numpy((mix(keys ^ np.uint64(1)) % span).astype(np.int64))
    mirrored = torch.from_numpy((mix(keys ^ np.uint64(2)) % np.uint64(2)).astype(bool)) & flip
    padded = fill.expand(count, channels, height + 2 * shift, width + 2 * shift).clone()
    padded[:, :, shift : shift + height, shift : shift + width] = images
    rows = down[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = right[:, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Digits(Images):
    """1797 scanned digits of 8x8 pixels, bundled with scikit-learn: 1437 to train on, 360 to test.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """

    num_classes = 10

    def __init__(self, train: bool, *, augment: bool = False):
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


def read_digits() -> np.ndarray:
    """scikit-learn's bundled table, `[1797, 65]`: 64 pixels of 0 to 16 and the label.

    Read from where the package lies, because importing scikit-learn costs every rank a second.
    """
    found = find_spec("sklearn")
    path = (
        Path(found.submodule_search_locations[0], "datasets/data/digits.csv.gz")
        if found and found.submodule_search_locations
        else None
    )
    if path and path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


class Mnist(Images):
    """MNIST from its IDX files, in torchvision's layout: `root`/MNIST/raw. Fetched if absent.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
    """

    num_classes = 10
    FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

    def __init__(self, train: bool, *, root: str, augment: bool = False):
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


class Cifar10(Images):
    """CIFAR-10 from its python batches: `root`/cifar-10-batches-py. Fetched if absent.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    num_classes = 10
    TRAIN = tuple(f"data_batch_{n}" for n in range(1, 6))
    TEST = ("test_batch",)

    def __init__(self, train: bool, *, root: str, augment: bool = True):
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
    """A batch is a pickle from the network: let it build arrays and nothing else."""

    ALLOWED: ClassVar = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which no CIFAR batch needs")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """One python batch: `[N, 3, 32, 32] uint8` images and `[N] int64` labels. Raises DataError if it is not one."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        return torch.from_numpy(pixels.reshape(len(labels), 3, 32, 32).copy()), torch.from_numpy(
            labels.astype(np.int64)
        )
    except (OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, TypeError) as error:
        raise DataError(f"cannot read {path}: {error}; remove it to download it again") from error


class ImageFolder:
    """Pictures in `root`/train/CLASS and `root`/val/CLASS, resized and cropped to `image_size`.

    Training pictures are cropped and flipped at random if `augment`; the kit keys the random numbers by sample.
    """

    def __init__(self, train: bool, *, root: str, image_size: int = 224, augment: bool = True):
        from torchvision import datasets
        from torchvision.transforms import v2

        folder = Path(root) / ("train" if train else "val")
        if not folder.is_dir():
            raise DataError(
                f"{folder} is not a folder: put pictures into {root}/train/CLASS/ and {root}/val/CLASS/, or set data.root"
            )
        crop = (
            [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
            if augment and train
            else [v2.Resize(image_size * 8 // 7, antialias=True), v2.CenterCrop(image_size)]
        )
        normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        transform = v2.Compose([v2.ToImage(), *crop, v2.ToDtype(torch.float32, scale=True), normalize])
        try:
            self.pictures = datasets.ImageFolder(str(folder), transform)
        except (FileNotFoundError, OSError) as error:
            raise DataError(f"{folder}: {error}") from error
        self.num_classes = len(self.pictures.classes)
        self.input_shape = (3, image_size, image_size)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            picture, label = self.pictures[index]
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"cannot read picture {self.pictures.samples[index][0]}: {error}; replace or remove it"
            ) from error
        return picture, label

    def fingerprint(self) -> str:
        files = ((Path(path).name, label, Path(path).stat().st_size) for path, label in self.pictures.samples)
        return f"{len(self)}:{hash_of(files)}"


def hash_of(items: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]


def download(fetch: Any, what: str) -> None:
    """Run `fetch`; where that fails, say what to place where instead."""
    try:
        fetch()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"download failed ({reason}): place {what}, or set data.root to where it is") from error
