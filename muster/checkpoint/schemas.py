"""Schemas of manifest.json, index.json, best.json and owner-N.json, checked on reading: disks flip bits, users edit.

A manifest contains its own digest, which reveals a changed number. Checkpoints of earlier versions have no digest, and
no entries beyond the schema; a manifest with further entries and no digest has lost it. File names are single path
components.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from muster.errors import Damaged

INDEX, BEST = "index.json", "best.json"
DIGEST = "digest"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def _part(name: str) -> str:
    if not PART.fullmatch(name):
        raise ValueError("is not a file name")
    return name


def _dtype(name: str) -> str:
    import torch  # takes seconds, which a report of the run does not need

    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("is not a tensor dtype")
    return name


Part = Annotated[str, AfterValidator(_part)]
"""A single path component, without characters that have a special meaning to a file system or fsspec."""
Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Record(BaseModel):
    """Base of the schemas. Types are strict; entries that are not declared are allowed and ignored."""

    model_config = ConfigDict(strict=True, extra="allow")


T = TypeVar("T", bound=Record)


class Facts(Record):
    """Size in bytes and SHA-256 of a file."""

    size: Whole
    sha256: str


PLAIN = ("loss", "error", "perplexity")
"""Endings of names of which less is better, whatever stands before them."""
LOWER = {
    "err", "ppl", "nll", "mae", "mse", "rmse", "mape", "smape", "msle", "rmsle", "regret", "wer", "cer", "bpb", "bpc",
    "distance", "divergence", "kl", "ece", "brier", "hamming", "fid", "lpips",
}  # fmt: skip
HIGHER = {
    "accuracy", "acc", "top", "f", "fbeta", "precision", "recall", "sensitivity", "specificity", "auc", "auroc",
    "auprc", "ap", "map", "iou", "miou", "jaccard", "dice", "bleu", "rouge", "r", "psnr", "ssim", "ndcg", "mrr",
    "kappa", "mcc", "similarity", "correlation", "pearson", "spearman", "reward", "match",
}  # fmt: skip
TURNED = {
    "neg", "negative", "inv", "inverse", "minus", "improvement", "reduction", "gain", "free", "skill", "drop", "gap", "std",
    "var", "variance", "delta", "diff", "difference", "cost", "no", "non", "without", "profit", "traveled", "travelled", "hit",
}  # fmt: skip
"""Words in metric names, without trailing digits. LOWER, HIGHER: less, or more, is better. TURNED: turns another word."""


def direction(metric: str) -> str:
    """Return the better direction, `min` or `max`, that a metric's name suggests; empty if it suggests none."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric).lower()
    words = [word for part in re.split(r"[^a-z0-9]+", parts) if (word := part.rstrip("0123456789"))]
    if TURNED & {*words} or re.match(r"1\W", metric):
        return ""
    if metric.lower().endswith(PLAIN):
        return "min"
    lower, higher = bool(LOWER & {*words}), bool(HIGHER & {*words})
    return "" if lower == higher else "min" if lower else "max"


def direction_before(metric: str) -> str:
    """Return the direction of runs whose best.json has none."""
    return "min" if metric.endswith(PLAIN) else "max"


class Best(Record):
    """best.json, and `best` of a manifest: the best evaluation so far."""

    metric: str
    value: float
    step: Whole
    mode: str = ""  # `min` or `max`: which value is the best; empty in files of earlier versions
    path: str = ""  # of its checkpoint; for display only
    data: str = ""  # fingerprint of what a job has evaluated


class Marker(Record):
    """owner-N.json: the owner of a storage."""

    folder: str
    host: str
    attempt: str
    agents: list[str]


class Manifest(Record):
    """manifest.json. Files are named ATTEMPT/FILE in an object store, FILE elsewhere."""

    format: Whole = 1
    step: Whole
    attempt: Part
    world_size: Annotated[int, Field(ge=1)]
    files: dict[str, Facts]
    epoch: Whole = 0
    samples: Whole = 0
    evaluated: Whole = 0
    best: Best | None = None
    stopped: str | None = None
    fingerprint: str = ""
    total_steps: Whole = 0
    threads: Whole | None = None
    computes_on: list[str] = []
    config_hash: str = ""
    config: dict[str, Any] = {}
    averages: list[str] = ["callbacks/ema/"]  # as it was before a manifest said so
    torch: str = ""
    digest: str = ""

    @model_validator(mode="after")
    def _names(self) -> Self:
        for file in self.files:
            _part(file.removeprefix(f"{self.attempt}/"))
        return self


class Piece(Record):
    """A part of a tensor. `at`: byte offset in `file`."""

    offsets: list[Whole]
    sizes: list[Whole]
    file: Part
    at: Whole


class Entry(Record):
    """A tensor and the pieces that cover it."""

    size: list[Whole]
    dtype: Annotated[str, AfterValidator(_dtype)]
    pieces: list[Piece]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.size) or any(
                at + size > whole for at, size, whole in zip(piece.offsets, piece.sizes, self.size, strict=True)
            ):
                raise ValueError("has a piece outside its size")
        if sum(math.prod(piece.sizes) for piece in self.pieces) != math.prod(self.size):
            raise ValueError("is not covered by its pieces")
        return self


class Value(Record):
    file: Part
    at: Whole


class Index(Record):
    """index.json: the location of every tensor and plain value."""

    tensors: dict[str, Entry]
    values: dict[str, Value]

    def files(self) -> Iterator[str]:
        yield from (piece.file for entry in self.tensors.values() for piece in entry.pieces)
        yield from (value.file for value in self.values.values())


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return the content of manifest.json, with the digest of all its entries."""
    return json.dumps({**manifest, DIGEST: _digest(manifest)}, indent=1).encode()


def read_manifest(text: bytes, *, step: int) -> dict[str, Any]:
    """Parse and check manifest.json of the checkpoint of `step`. Raises Damaged."""
    manifest = _json(text)
    if DIGEST in manifest and manifest[DIGEST] != _digest({k: v for k, v in manifest.items() if k != DIGEST}):
        raise Damaged("it has changed since it was written: its own SHA-256 differs")
    found = _checked(Manifest, manifest)
    if DIGEST not in manifest and found.model_extra:
        raise Damaged(f"it has {', '.join(found.model_extra)} but no {DIGEST}: it has changed since it was written")
    if found.step != step:
        raise Damaged(f"it is of step {found.step}")
    return manifest


def read_index(text: bytes, manifest: dict[str, Any]) -> dict[str, Any]:
    """Parse and check index.json of a checkpoint with this manifest. Raises Damaged."""
    index = _json(text)
    there = {file.rpartition("/")[2] for file in manifest["files"]}
    if unknown := next((file for file in _checked(Index, index).files() if file not in there), None):
        raise Damaged(f"it reads from {unknown}, which is not a file of the checkpoint")
    return index


def read_marker(text: bytes) -> dict[str, Any]:
    """Parse and check owner-N.json. Raises Damaged."""
    marker = _json(text)
    _checked(Marker, marker)
    return marker


def read_best(folder: Path) -> Best | None:
    """Read best.json in a run's `folder`; None if it is missing or damaged."""
    try:
        best = _checked(Best, _json((folder / BEST).read_bytes()))
    except (OSError, Damaged):
        return None
    best.mode = best.mode or direction_before(best.metric)
    return best


def is_better(value: float, best: float, *, mode: str, by: float = 0.0) -> bool:
    """Return True if `value` is better than `best` by more than `by`; NaN and infinities are worse than any number."""
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode} is neither min nor max")
    if not (math.isfinite(value) and math.isfinite(best)):
        return math.isfinite(value)
    return value < best - by if mode == "min" else value > best + by


def _digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest as JSON: with keys as strings, in sorted order."""
    plain = json.dumps(json.loads(json.dumps(manifest)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def _json(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise Damaged("it is not a JSON object")
    return record


def _checked(kind: type[T], record: dict[str, Any]) -> T:
    try:
        return kind.model_validate(record)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise Damaged("it is nested too deeply") from error
        first = error.errors()[0]
        raise Damaged(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"[:300]) from error
