"""What the suite has to know of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.conformance.parts import EPOCHS, SAVE_EVERY


@dataclass(frozen=True)
class Trainer:
    """Where a trainer leaves its files in a run's folder, and how its worker is started.

    checkpoints: from the oldest to the newest, files or folders.
    metrics: the steps of the losses that it has logged, in the order in which a reader finds them.
    save_every: the steps from one save to the next.
    """

    title: str
    packages: tuple[str, ...]
    worker: Callable[[Path, int], list[str]]
    checkpoints: Callable[[Path], list[Path]]
    metrics: Callable[[Path], list[int]]
    weights: str = "final.pt"
    save_every: int = SAVE_EVERY

    def versions(self) -> dict[str, str | None]:
        """Of its packages; None for what is not installed."""
        return {name: _version(name) for name in self.packages}

    def command(self, folder: Path, *, epochs: int = EPOCHS) -> list[str]:
        """What torchrun is to run."""
        return self.worker(folder, epochs)

    def newest_file(self, folder: Path) -> Path:
        """The largest file of the newest checkpoint."""
        newest = self.checkpoints(folder)[-1].resolve()
        files = [newest] if newest.is_file() else [path for path in newest.rglob("*") if path.is_file()]
        return max(files, key=lambda path: path.stat().st_size)


def script(module: str) -> Callable[[Path, int], list[str]]:
    """The adapter itself is the worker: `-m MODULE FOLDER EPOCHS`."""
    return lambda folder, epochs: ["-m", module, str(folder), str(epochs)]


def numbered(paths: list[Path]) -> list[Path]:
    """By the number that their names end with."""
    return sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2].rpartition("_")[2]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
