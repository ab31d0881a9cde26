"""WebDataset tar files with an index, so that every sample can be read by itself.

In a shard, the files of a sample are consecutive and have the same name except for their extensions: 000017.jpg,
000017.cls.

Source: https://github.com/webdataset/webdataset#the-webdataset-format
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from muster.data.fingerprint import hash_of
from muster.errors import DataError
from muster.files import replace_file
from muster.train.data.images import rgb

INDEX = "muster-index.json"
PICTURES = ("jpg", "jpeg", "png")


class Shards:
    """Samples of `root`/train/*.tar and `root`/val/*.tar: pairs of the files with extensions `input` and `target`.

    jpg, jpeg and png become `[3, H, W] float32` from 0 to 1, in steps of 1/255, resized to `image_size` if it is given;
    cls and id an int, txt a str, json its content, npy a tensor, others bytes. The index is written beside the shards if
    the folder is writable.
    Raises DataError: there are no shards, or one cannot be read.
    """

    def __init__(self, train: bool, *, root: str, input: str, target: str, image_size: int | None, num_classes: int):
        self.folder = Path(root) / ("train" if train else "val")
        self.endings, self.image_size, self.num_classes = (input, target), image_size, num_classes
        self.samples = index(self.folder)
        self.is_compact = False
        self._open: dict[str, int] = {}

    @staticmethod
    def prepare(root: str, **_: Any) -> None:
        for split in ("train", "val"):
            if (Path(root) / split).is_dir():
                index(Path(root) / split, write=True)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        shard, files = self.samples[index]
        missing = [ending for ending in self.endings if ending not in files]
        if missing:
            raise DataError(f"sample {index} in {self.folder / shard} has no .{missing[0]}: it has {', '.join(files)}")
        inputs, targets = (self._decode(shard, ending, *files[ending]) for ending in self.endings)
        if not self.is_compact:
            inputs = self.expand(inputs)
        return inputs, targets.float() / 255 if self.endings[1] in PICTURES else targets

    def compact(self) -> Shards:
        other = copy.copy(self)
        other.is_compact, other._open = self.endings[0] in PICTURES, {}
        return other

    def expand(self, inputs: Any) -> Any:
        """Return `[..., 3, H, W] uint8` pictures as float32 from 0 to 1, on their device; other inputs as they are."""
        return inputs.float() / 255 if self.endings[0] in PICTURES else inputs

    def fingerprint(self) -> str:
        return f"{len(self)}:{hash_of([shard, sorted(files.items())] for shard, files in self.samples)}"

    def _decode(self, shard: str, ending: str, at: int, size: int) -> Any:
        if shard not in self._open:
            self._open[shard] = os.open(self.folder / shard, os.O_RDONLY)
        data = os.pread(self._open[shard], size, at)
        try:
            if ending in PICTURES:
                return self._picture(data)
            return DECODE.get(ending, bytes)(data)
        except Exception as error:
            raise DataError(f"{self.folder / shard}: a .{ending} at byte {at} cannot be read: {error}") from error

    def _picture(self, data: bytes) -> torch.Tensor:
        picture: torch.Tensor = pil_to_tensor(rgb(Image.open(io.BytesIO(data))))
        if self.image_size:
            side = [self.image_size, self.image_size]
            picture = torch.nn.functional.interpolate(picture[None], side, mode="bilinear", antialias=True)[0]
        return picture

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # each worker opens its own files


DECODE: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda data: int(data),
    "id": lambda data: int(data),
    "txt": lambda data: data.decode(),
    "json": json.loads,
    "npy": lambda data: torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False)),
}
Sample = tuple[str, dict[str, tuple[int, int]]]
"""(shard, extension -> (offset, size) in bytes)"""


def index(folder: Path, *, write: bool = False) -> list[Sample]:
    """Return all samples in the order of shard names, from the index file if it matches, else from the shards.

    `write`: also write the index file if the folder is writable. Raises DataError as `Shards` does.
    """
    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise DataError(f"there is no *.tar in {folder}: put shards into train/ and val/, or set data.root")
    stamps = {shard.name: [(stat := shard.stat()).st_size, stat.st_mtime_ns] for shard in shards}
    kept = folder / INDEX
    if (found := _kept(kept, stamps)) is not None:
        return found
    samples = [sample for shard in shards for sample in _read(shard)]
    if write and os.access(folder, os.W_OK):
        text = json.dumps({"shards": stamps, "digest": _digest(samples), "samples": samples})
        replace_file(kept, lambda draft: draft.write_text(text, encoding="utf-8"))
    return samples


def _kept(path: Path, stamps: dict[str, list[int]]) -> list[Sample] | None:
    """Return the samples of the index at `path`; None if it is damaged, or the shards' sizes or times differ.

    A tar file is padded to 10 KiB, so different samples may give a file of the same size.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["shards"] != stamps or found["digest"] != _digest(found["samples"]):
            return None
        return [
            (shard, {ending: (at, size) for ending, (at, size) in files.items()}) for shard, files in found["samples"]
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _digest(samples: list[Any]) -> str:
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


def _read(shard: Path) -> list[Sample]:
    by_name: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.isfile():
                    folder, _, file = member.name.rpartition("/")
                    name, _, ending = file.partition(".")
                    by_name.setdefault(f"{folder}/{name}", {})[ending.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"cannot read {shard}: {error}; replace or remove it") from error
    return [(shard.name, files) for files in by_name.values()]
