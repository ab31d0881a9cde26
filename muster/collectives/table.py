"""The figures as tables for the terminal, as JSON, and as a plot."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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


COLOURS = dict(zip((each.name for each in ALGORITHMS), ("#d55e00", "#009e73", "#0072b2", "#cc79a7"), strict=True))
MARKS = dict(zip((each.name for each in ALGORITHMS), "sDo^", strict=True))
LINES = dict(
    zip((each.name for each in ALGORITHMS), ("-", "--", "-", "--"), strict=True)
)  # dashed, to show lines that coincide


def draw(figures: Figures, path: Path) -> None:
    """Write a PNG: the fit of single messages, then all-reduces, one panel per world size. Raises StorageError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    world_sizes = list(dict.fromkeys(each.world_size for each in figures.measured))
    columns = 2 if len(world_sizes) <= 3 else 3
    rows = -(-(1 + len(world_sizes)) // columns)
    picture, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.7 * rows + 0.8), squeeze=False)
    axes = grid.ravel()
    for axis in axes[1 + len(world_sizes) :]:
        axis.remove()
    sizes = [nbytes for nbytes, _ in figures.ping_pong]
    draw_fit(axes[0], figures)
    for axis, world_size in zip(axes[1:], world_sizes, strict=False):
        draw_world(axis, figures, world_size)
    for axis in axes[: 1 + len(world_sizes)]:
        dress(axis, sizes)
    picture.suptitle(
        f"Points: measured with {figures.backend} on {figures.setting}\n"
        "Lines: the alpha-beta model, fitted to the points of the first panel",
        fontsize=10,
    )
    handles, labels = axes[1].get_legend_handles_labels()
    picture.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    picture.tight_layout(rect=(0, 0.06, 1, 1))
    replace_file(path, lambda draft: picture.savefig(draft, format="png", dpi=110))
    plt.close(picture)


def draw_fit(axis: Any, figures: Figures) -> None:
    sizes, seconds = np.array(figures.ping_pong).T
    along = np.geomspace(sizes[0], sizes[-1], 100)
    network = figures.network
    axis.plot(sizes, seconds * 1e3, "o", color="0.2")
    axis.plot(along, (network.alpha_s + network.beta_s * along) * 1e3, color="0.2", lw=1.2)
    axis.set_title("one message, from rank 0 to rank 1")
    text = f"alpha = {network.alpha_s * 1e6:.1f} us\nbeta = {network.beta_s * 1e9:.3f} ns/B"
    axis.text(0.05, 0.93, text, transform=axis.transAxes, va="top")


def draw_world(axis: Any, figures: Figures, world_size: int) -> None:
    here = [each for each in figures.measured if each.world_size == world_size]
    for algorithm in ALGORITHMS:
        mine = [each for each in here if each.name == algorithm.name]
        colour = COLOURS[algorithm.name]
        sizes = np.array([each.nbytes for each in mine])
        along = np.geomspace(sizes[0], sizes[-1], 100)
        model = [figures.network.seconds(algorithm.cost(world_size, nbytes)) * 1e3 for nbytes in along]
        axis.plot(along, model, LINES[algorithm.name], color=colour, lw=1.3)
        points = [each.seconds * 1e3 for each in mine]
        axis.plot(sizes, points, MARKS[algorithm.name], color=colour, ms=5, label=algorithm.name)
    own = [each for each in here if each.name == f"{figures.backend} all_reduce"]
    axis.plot(
        [each.nbytes for each in own], [each.seconds * 1e3 for each in own],
        "x:", color="black", ms=6, lw=1, label=own[0].name,
    )  # fmt: skip
    axis.set_title(f"all-reduce among {world_size} ranks")


def dress(axis: Any, sizes: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    shown = sizes[:: -max(1, len(sizes) // 4)]
    axis.set_xticks(shown, [in_words(nbytes) for nbytes in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("size of the tensor")
    axis.set_ylabel("milliseconds")
    axis.grid(alpha=0.3)
