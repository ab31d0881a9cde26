"""Segmentation of a disc in noise, with metrics by pixel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Discs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a noisy image of one disc, `[1, side, side] float32`, and its mask, `[side, side] int64`."""

    def __init__(self, *, train: bool, size: int, side: int):
        self.size, self.side, self.first = size if train else size // 4, side, 0 if train else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        middle, radius = torch.rand(2, generator=generator) * self.side, 3 + torch.rand(1, generator=generator) * 4
        grid = torch.stack(torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij"), -1)
        mask = (grid - middle).norm(dim=-1) < radius
        return (mask + 0.5 * torch.randn(mask.shape, generator=generator))[None], mask.long()


class Net(nn.Sequential):
    """Maps images `[B, 1, H, W]` to logits `[B, 2, H, W]`."""

    def __init__(self, *, width: int):
        super().__init__(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(),
            nn.Conv2d(width, width, 5, padding=2), nn.ReLU(),
            nn.Conv2d(width, 2, 1),
        )  # fmt: skip


class Pixels:
    """Cross-entropy by pixel. A metric (sum, count) is a mean over the count, here pixels instead of samples."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        right, disc = outputs.argmax(1) == targets, targets == 1
        return {
            "loss": self(outputs, targets) * len(targets),
            "pixels": (right.sum(), torch.tensor(right.numel())),
            "found": ((right & disc).sum(), disc.sum()),
        }
