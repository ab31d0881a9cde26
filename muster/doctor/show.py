"""Output of the doctor: a table and a heat map in the terminal, doctor.json, links.png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.errors import storage_error
from muster.files import replace_file

STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green", "not here": "dim"}
"""Colors of a check's result. A check that no rank can make is not here."""
SHADES = ("green", "yellow", "dark_orange", "red")
"""Colors of links from the median's speed up, from a half, from a quarter, and slower."""


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table of checks, the findings with their remedies, and the link speeds of more than two ranks."""
    table = Table("check", "", "seen", "s", box=None, pad_edge=False)
    for result in results:
        word = _word(result)
        table.add_row(result["check"], Text(word, style=STYLES[word]), Text(result["seen"]), f"{result['seconds']:.1f}")
    console.print(table)
    for result in results:
        for finding in result["findings"]:
            name = "fail" if finding["fails"] else "warn"
            console.print(
                Text(f"{name}: ", style=STYLES[name])
                + Text(f"{result['check']}: {finding['what']}; {finding['remedy']}"),
                soft_wrap=True,
            )
    speeds = matrix(results)
    if len(speeds) > 2:
        heat_map(speeds, console)


def _word(result: dict[str, Any]) -> str:
    if not result["here"]:
        return "not here"
    return "fail" if any(each["fails"] for each in result["findings"]) else "warn" if result["findings"] else "ok"


def verdict(results: Sequence[dict[str, Any]]) -> str:
    """Return whether this cluster can train, in one sentence; if it cannot, what to mend first."""
    failed, warned = wrong(results)
    if failed:
        rest = f" (and {len(failed) - 1} more: see above)" if len(failed) > 1 else ""
        return f"this cluster cannot train yet: mend first {failed[0]}{rest}"
    ranks = results[0]["ranks"]
    hosts = len({facts["host"] for facts in ranks})
    there = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    but = f"; {len(warned)} warning{'s' * (len(warned) > 1)} above may cost speed" if warned else ""
    return f"this cluster can train, with {there}{but}"


def wrong(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the findings that fail and those that only warn, one line each."""
    lines = [
        (finding["fails"], f"{result['check']}: {finding['what']}; {finding['remedy']}")
        for result in results
        for finding in result["findings"]
    ]
    return [line for fails, line in lines if fails], [line for fails, line in lines if not fails]


def bad_host(results: Sequence[dict[str, Any]]) -> str:
    """Return the one host of at least two to which every finding that fails belongs; empty if there is none."""
    hosts = {facts["host"] for result in results for facts in result["ranks"]}
    bad = {finding["host"] for result in results for finding in result["findings"] if finding["fails"]}
    return bad.pop() if len(bad) == 1 and len(hosts) > 1 else ""


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
    """Write doctor.json and, if links were measured, links.png to `folder`, which is created. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("create", error, folder) from error
    failed = [result["check"] for result in results if any(f["fails"] for f in result["findings"])]
    text = json.dumps(
        {"ok": not failed, "verdict": verdict(results), "failed": failed, "checks": list(results)}, indent=1
    )
    replace_file(folder / "doctor.json", lambda draft: draft.write_text(text + "\n", encoding="utf-8"))
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
