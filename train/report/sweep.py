"""What came of the jobs of a sweep, as a table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from train.loggers.jsonl import NAME, read

COORDINATES = ("kind", "step", "epoch")


def print_table(jobs: Sequence[tuple[str, int]]) -> None:
    """One row for each (folder, exit code), with the values of its last evaluation, or the last loss."""
    found = []
    for folder, code in jobs:
        lines = read(Path(folder) / NAME)
        ordered = [line for kind in ("eval", "train") for line in reversed(lines) if line["kind"] == kind]
        last: dict[str, Any] = ordered[0] if ordered else {}
        values = {name: value for name, value in last.items() if name not in COORDINATES}
        if last.get("kind") == "train":
            values = {"train loss": last["loss"]}
        found.append((folder, code, last.get("step", ""), values))
    names = list(dict.fromkeys(name for *_, values in found for name in values))
    table = Table("run", "exit code", "step", *names)
    for folder, code, step, values in found:
        cells = [f"{values[name]:.4g}" if isinstance(values.get(name), float) else "" for name in names]
        table.add_row(folder, str(code), str(step), *cells)
    Console(soft_wrap=True).print(table)
