"""Output of the doctor: a table and a heat map in the terminal, doctor.json, links.png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.files import replace_file

SHADES = ("green", "yellow", "dark_orange", "red")
"""Colors of links from the median's speed up, from a half, from a quarter, and slower."""


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table of checks, the findings with their remedies, and the link speeds of more than two ranks."""
    table = Table("check", "", "seen", "s", box=None, pad_edge=False)
    for result in results:
        worst = "fail" if any(f["fails"] for f in result["findings"]) else "warn" if result["findings"] else "ok"
        style = {"fail": "bold red", "warn": "yellow", "ok": "green"}[worst]
        table.add_row(result["check"], Text(worst, style=style), Text(result["seen"]), f"{result['seconds']:.1f}")
    console.print(table)
    for result in results:
        for finding in result["findings"]:
            word = Text("fail: " if finding["fails"] else "warn: ", style="bold red" if finding["fails"] else "yellow")
            console.print(word + Text(f"{result['check']}: {finding['what']}; {finding['remedy']}"), soft_wrap=True)
    speeds = matrix(results)
    if len(speeds) > 2:
        heat_map(speeds, console)


def wrong(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the findings that fail and those that only warn, one line each."""
    lines = [
        (finding["fails"], f"{result['check']}: {finding['what']}; {finding['remedy']}")
        for result in results
        for finding in result["findings"]
    ]
    return [line for fails, line in lines if fails], [line for fails, line in lines if not fails]


def matrix(results: Sequence[dict[str, Any]]) -> dict[int, dict[int, float]]:
    """Return rank -> rank -> MB/s of the measured links, in both directions."""
    found: dict[int, dict[int, float]] = {}
    for result in results:
        for facts in result["ranks"] if result["check"] == "links" else ():
            for name, (_, speed) in facts.get("links", {}).items():
                a, b = (int(rank) for rank in name.split("-"))
                found.setdefault(a, {})[b] = speed
                found.setdefault(b, {})[a] = speed
    return dict(sorted(found.items()))


def heat_map(speeds: dict[int, dict[int, float]], console: Console) -> None:
    """Print the link speeds as a matrix of colored blocks."""
    values = sorted(speed for row in speeds.values() for speed in row.values())
    usual = values[len(values) // 2]
    console.print(f"\nMB/s between ranks, {SHADES[0]} at the median of {usual:.0f} and above:")
    for a, row in speeds.items():
        line = Text(f"{a:>4} ")
        for b in speeds:
            shade = next((i for i, part in enumerate((1.0, 0.5, 0.25)) if row.get(b, 0) >= part * usual), 3)
            line.append("  " if a == b else "\u2588\u2588", style="" if a == b else SHADES[shade])
        console.print(line)


def write(results: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write doctor.json and, if links were measured, links.png to `folder`. Raises StorageError."""
    failed = [result["check"] for result in results if any(f["fails"] for f in result["findings"])]
    text = json.dumps({"ok": not failed, "failed": failed, "checks": list(results)}, indent=1)
    replace_file(folder / "doctor.json", lambda draft: draft.write_text(text + "\n"))
    if len(speeds := matrix(results)) > 1:
        _draw(speeds, folder / "links.png")


def _draw(speeds: dict[int, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(speeds)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow([[speeds[a].get(b, float("nan")) for b in names] for a in names], cmap="viridis", vmin=0)
    for ticks in (axes.set_xticks, axes.set_yticks):
        ticks(range(len(names)), [str(name) for name in names])
    axes.set_title("MB/s between ranks")
    figure.colorbar(picture)
    figure.savefig(path, dpi=120)
