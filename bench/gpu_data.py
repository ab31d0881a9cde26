"""Images that cost the host next to nothing: what is timed is the loop and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.sample_plan import Keys
from muster.train.data.images import Images

SIZE = 10_000_000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures(Images):
    """`SIZE` images of `side` by `side` pixels, which are `pool` random ones again and again."""

    def __init__(self, train: bool, *, side: int, num_classes: int, pool: int):
        draw = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (pool, 3, side, side), dtype=torch.uint8, generator=draw)
        labels = torch.randint(num_classes, (pool,), generator=draw)
        super().__init__(pixels, labels, mean=MEAN, std=STD, shift=0, flip=False)
        self.num_classes = num_classes

    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, indices: Sequence[int], keys: Keys | None = None) -> tuple[Tensor, Tensor]:
        return super().__getitems__([index % len(self.images) for index in indices])

    def fingerprint(self) -> str:
        return f"{len(self.images)}:{self.input_shape}"
