"""Tables of the figures for the terminal."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from muster.collectives.algorithm import Algorithm
from muster.collectives.collective import ALGORITHMS
from muster.collectives.measure import Figures, Measured
from muster.errors import storage_error
from muster.files import replace_file

WIDTH = 150  # if the output is not a terminal


def show(figures: Figures) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    network = figures.network
    console.print(
        f"{figures.backend} on {figures.device}, torch {figures.torch}: alpha {network.alpha_s * 1e6:.1f} us a message, "
        f"beta {network.beta_s * 1e9:.3f} ns a byte ({1e-9 / network.beta_s if network.beta_s else float('inf'):.2f} GB/s)"
    )
    console.print(times(figures))
    console.print(bytes_sent(figures))


def times(figures: Figures) -> Table:
    names = list(dict.fromkeys(each.name for each in figures.measured))
    table = Table(title="milliseconds a call (x: over the model's)", title_justify="left")
    for heading in ("ranks", "bytes", *names):
        table.add_column(heading, justify="right")
    found = {(each.world_size, each.nbytes, each.name): each for each in figures.measured}
    for world_size in dict.fromkeys(each.world_size for each in figures.measured):
        for nbytes in dict.fromkeys(each.nbytes for each in figures.measured):
            row = [_cell(found[world_size, nbytes, name]) for name in names]
            table.add_row(str(world_size), in_words(nbytes), *row)
        table.add_section()
    return table


def bytes_sent(figures: Figures) -> Table:
    largest = max(each.nbytes for each in figures.measured)
    table = Table(title=f"sent for one all-reduce of n = {in_words(largest)}", title_justify="left")
    for heading in ("ranks", "algorithm", "rounds", "by the busiest rank", "theory", "by all ranks", "theory"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for each in figures.measured:
        if each.nbytes == largest and each.sent_bytes and each.name in (*THEORY, f"{figures.backend} all_reduce"):
            rounds, busiest, total = THEORY.get(each.name, _unknown)(each.world_size)
            table.add_row(
                str(each.world_size), each.name, rounds,
                f"{max(each.sent_bytes) / largest:.3f} n", busiest, f"{sum(each.sent_bytes) / largest:.3f} n", total,
            )  # fmt: skip
    return table


def in_words(nbytes: int) -> str:
    """Format bytes: 1048576 as `1 MiB`."""
    return ByteSize(nbytes).human_readable(separator=" ").replace(".0 ", " ")


def _cell(measured: Measured) -> str:
    over = f" x{measured.seconds / measured.model_seconds:4.1f}" if measured.model_seconds else ""
    return f"{measured.seconds * 1e3:.3g}{over}"


def _in_theory(algorithm: Algorithm, world_size: int) -> tuple[str, str, str]:
    cost = algorithm.cost(world_size, 1)
    return str(cost.messages), f"{cost.busiest_bytes:.3f} n", f"{2 * (world_size - 1):.3f} n"


def _unknown(world_size: int) -> tuple[str, str, str]:
    return "", "", ""


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` to `path`, and create its folder. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("make the folder", error) from error
    text = json.dumps(figures, indent=1) + "\n"
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


THEORY = {each.name: partial(_in_theory, each) for each in ALGORITHMS}
