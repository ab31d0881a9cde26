"""Description of a trainer for the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.conformance.parts import EPOCHS, SAVE_EVERY


@dataclass(frozen=True)
class Trainer:
    """The files of a trainer in a run's folder, and the command of its worker.

    checkpoints: returns files or folders, from the oldest to the newest.
    metrics: returns the steps of the logged losses, in the order of the log.
    save_every: steps between saves.
    """

    title: str
    packages: tuple[str, ...]
    worker: Callable[[Path, int], list[str]]
    checkpoints: Callable[[Path], list[Path]]
    metrics: Callable[[Path], list[int]]
    weights: str = "final.pt"
    save_every: int = SAVE_EVERY

    def versions(self) -> dict[str, str | None]:
        """Return the versions of its packages; None for one that is not installed."""
        return {name: _version(name) for name in self.packages}

    def command(self, folder: Path, *, epochs: int = EPOCHS) -> list[str]:
        """Return the arguments of torchrun that name the worker."""
        return self.worker(folder, epochs)

    def newest_file(self, folder: Path) -> Path:
        """Return the largest file of the newest checkpoint."""
        newest = self.checkpoints(folder)[-1].resolve()
        files = [newest] if newest.is_file() else [path for path in newest.rglob("*") if path.is_file()]
        return max(files, key=lambda path: path.stat().st_size)


def script(module: str) -> Callable[[Path, int], list[str]]:
    """Return the command if the adapter itself is the worker: `-m MODULE FOLDER EPOCHS`."""
    return lambda folder, epochs: ["-m", module, str(folder), str(epochs)]


def numbered(paths: list[Path]) -> list[Path]:
    """Return paths sorted by the number at the end of their names."""
    return sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2].rpartition("_")[2]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
