"""Image folders, one per class."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from muster.data.fingerprint import hash_of
from muster.errors import DataError


class ImageFolder:
    """Images in `root`/train/CLASS and `root`/val/CLASS, resized and cropped to `image_size`.

    If `augment`, training images are cropped and flipped at random; the kit keys the random numbers by sample.
    """

    def __init__(self, train: bool, *, root: str, image_size: int, augment: bool):
        from torchvision import datasets
        from torchvision.transforms import v2

        from muster.train.data.images import read_rgb

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
        transform = v2.Compose([v2.ToImage(), *crop])
        try:
            self.pictures = datasets.ImageFolder(str(folder), transform, loader=read_rgb)
        except (FileNotFoundError, OSError) as error:
            raise DataError(f"{folder}: {error}") from error
        self.is_compact = False
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
        return picture if self.is_compact else self.expand(picture), label

    def compact(self) -> ImageFolder:
        other = copy.copy(self)
        other.is_compact = True
        return other

    def expand(self, pictures: Tensor) -> Tensor:
        """Return `[..., 3, H, W] uint8` pictures as normalized float32, on their device."""
        mean, std = mean_and_std(pictures.device)
        return pictures.as_subclass(Tensor).float().mul_(1 / 255).sub_(mean).div_(std)

    def fingerprint(self) -> str:
        files = ((Path(path).name, label, Path(path).stat().st_size) for path, label in self.pictures.samples)
        return f"{len(self)}:{hash_of(files)}"


@cache  # a copy from memory that is not pinned would wait for the device, for each batch
def mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and standard deviation, `[3, 1, 1] float32` each, on `device`."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return mean.view(3, 1, 1).to(device), std.view(3, 1, 1).to(device)
