"""Compare the kit's loader with usual hand-written loaders: `python -m bench.input` (`--quick`: few samples).

Images in memory with a random crop and flip: the kit transforms a whole micro-batch at once, with random numbers of each
sample; the other is a DataLoader that transforms one image at a time with PIL. A folder of JPEGs: the kit's
`imagefolder`, and torchvision's reference loader (ImageFolder, PIL, RandomResizedCrop) with the same number of workers.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms
from torchvision.io import write_jpeg

from muster.data.loader import LoaderConfig, batches
from muster.sample_plan import Plan, Share
from muster.train.data.imagefolder import ImageFolder
from muster.train.data.images import Images

ROUNDS = int(os.environ.get("ROUNDS", "5"))
QUICK = "--quick" in sys.argv
SAMPLES, SIDE, BATCH = 256 if QUICK else 8192, 32, 64
PICTURES, PICTURE_SIDE, WORKERS = 64 if QUICK else 256, 400, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ByPil(Dataset[Any]):
    """Transforms one image at a time, like torchvision's CIFAR10."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels
        crop = [transforms.RandomCrop(SIDE, padding=4), transforms.RandomHorizontalFlip()]
        self.change = transforms.Compose(
            [transforms.ToPILImage(), *crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.change(self.images[index]), self.labels[index]


def kit(dataset: Any, *, workers: int, epochs: int) -> Iterator[Any]:
    plan = Plan(len(dataset), BATCH)
    config = LoaderConfig(Share(0, 1), torch.device("cpu"), num_workers=workers)
    return batches(dataset, plan, range(epochs * plan.steps_per_epoch), config)


def speed(samples: int, stream: Any) -> float:
    """Return samples per second, measured from the first batch on."""
    turn = iter(stream)
    next(turn)
    began = time.perf_counter()
    for _ in turn:
        pass
    return (samples - BATCH) / (time.perf_counter() - began)


def compare(name: str, samples: int, ours: Any, theirs: Any) -> None:
    rounds = [(speed(samples, ours()), speed(samples, theirs())) for _ in range(ROUNDS)]
    kit_speed, their_speed = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(mine / other for mine, other in rounds)
    print(f"| {name} | {kit_speed:.0f} | {their_speed:.0f} | {ratio:.2f} |", flush=True)


def pictures(root: Path) -> None:
    for number in range(PICTURES):
        folder = root / "train" / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = torch.rand(
            1, 3, 25, 25
        )  # noise alone would not resemble an image: it compresses badly and decodes slowly
        smooth = torch.nn.functional.interpolate(coarse, size=(PICTURE_SIDE, PICTURE_SIDE), mode="bilinear")[0]
        write_jpeg((smooth * 255).byte(), str(folder / f"{number}.jpg"), quality=90)


def main() -> None:
    """Print one row per kind of data."""
    torch.set_num_threads(1)
    print("| data | kit, samples/s | beside it, samples/s | ratio |\n|---|---|---|---|", flush=True)
    images = torch.randint(0, 256, (SAMPLES, 3, SIDE, SIDE), dtype=torch.uint8)
    labels = torch.randint(0, 10, (SAMPLES,))
    own = Images(images, labels, mean=MEAN, std=STD, shift=4, flip=True)
    compare(
        "images in memory, crop and flip, no workers",
        SAMPLES,
        lambda: kit(own, workers=0, epochs=1),
        lambda: DataLoader(ByPil(images, labels), batch_size=BATCH, shuffle=True),
    )
    with tempfile.TemporaryDirectory() as root:
        pictures(Path(root))
        reference = datasets.ImageFolder(
            f"{root}/train",
            transforms.Compose(
                [
                    transforms.RandomResizedCrop(224),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                    transforms.Normalize(MEAN, STD),
                ]
            ),
        )
        folder = ImageFolder(True, root=root, image_size=224, augment=True)
        for workers in (0, WORKERS):
            compare(
                f"JPEGs of {PICTURE_SIDE} x {PICTURE_SIDE} to 224 x 224, {workers or 'no'} workers",
                2 * PICTURES,
                lambda workers=workers: kit(folder, workers=workers, epochs=2),
                lambda workers=workers: _epochs(
                    DataLoader(reference, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0), 2
                ),
            )


def _epochs(loader: Any, number: int) -> Iterator[Any]:
    for _ in range(number):
        yield from loader


if __name__ == "__main__":
    main()
