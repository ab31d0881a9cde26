"""The report's figures, as data for Plotly's script, or None where there is too little to show.

Source: https://plotly.com/javascript/reference/
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from muster.loggers.console import OF_A_STEP
from muster.report.history import LOSSES, History, differing

Figure = dict[str, Any]
DECADES = 30.0
"""Positive values of a sweep that spread by this factor are on a logarithmic axis."""
MOST_POINTS = 2000
"""Points of a curve; longer ones are thinned out evenly."""
COLOURS = {
    "steps": "#2e9e6b", "compute": "#2e9e6b", "data wait": "#e8a33d", "data": "#e8a33d", "wait": "#8c8f98", "evaluation": "#5b8def",
    "checkpoint": "#9a6fd0", "repeated steps": "#d9534f", "start": "#57b5c4", "restart": "#c47f57", "down": "#7a5c5c",
    "survived deaths": "#b5547a",
}  # fmt: skip
RUNS = ("#4c8dd6", "#e07b39", "#2e9e6b", "#c94f7c", "#8d6bd1", "#a58a2c", "#3aa6a6", "#d2605b", "#6d7f94", "#7fae3b")
WORDS = {
    "lr": "learning rate", "samples_per_s": "samples a second", "tokens_per_s": "tokens a second",
    "mfu": "model FLOPs utilization, a share of the devices' peak", "peak_memory_gib": "most memory of a device, GiB",
    "loss": "loss", "grad_norm": "gradient norm",
    "wait": "waits for others", "data": "waits for data", "compute": "computes and steps",
}  # fmt: skip

SPEEDS = ("samples_per_s", "tokens_per_s", "mfu")


def curves(histories: Sequence[History]) -> list[Figure]:
    """Return a figure each of loss, metrics, learning rate, speed, memory and gradient norm, over steps and time."""
    measured = [name for history in histories for line in history.evals for name in line]
    more = [name for history in histories for line in history.train[:1] for name in line]
    known = {"kind", "step", "epoch", "samples", "loss", *OF_A_STEP}
    names = [name for name in dict.fromkeys([*measured, *more]) if name not in known]
    figures = [_curve(histories, "loss")]
    figures += [_curve(histories, name) for name in names]
    figures += [_curve(histories, name) for name in ("lr", *SPEEDS, "peak_memory_gib", "grad_norm")]
    return [figure for figure in figures if figure["data"] and not (len(histories) > 1 and _is_constant(figure))]


def _is_constant(figure: Figure) -> bool:
    """True if all runs have one value, or each has one rate: a figure of several runs shows what differs."""
    each = [{*trace["y"]} for trace in figure["data"]]
    return len(set().union(*each)) == 1 or (figure["title"] == WORDS["lr"] and all(len(values) == 1 for values in each))


def _curve(histories: Sequence[History], name: str) -> Figure:
    data: list[Figure] = []
    for number, history in enumerate(histories):
        colour, several = RUNS[number % len(RUNS)], len(histories) > 1
        for kind, lines in (("train", history.train), ("test", history.evals)):
            points = _thinned([line for line in lines if isinstance(line.get(name), (int, float))])
            if not points:
                continue
            dot = kind == "test"
            label = f"{history.name} {kind}" if several else kind
            data.append(
                {
                    "x": [line["step"] for line in points],
                    "y": [line[name] for line in points],
                    "times": [_rounded(history.time_of(line["step"])) for line in points],
                    "name": label, "legendgroup": history.name, "mode": "lines+markers" if dot or not points[1:] else "lines",
                    "line": {"width": 2 if dot else 1.2, "color": colour if several else RUNS[dot], "dash": "dot" if dot and several else "solid"},
                    "marker": {"size": 5}, "noisy": kind == "train" and name != "lr",
                    "hovertemplate": f"%{{y:.5~g}} at %{{x}}<extra>{label}</extra>",
                }
            )  # fmt: skip
    values = [value for trace in data for value in trace["y"]]
    spread = name == "loss" or (
        name == "lr" and len(histories) > 1 and max(values, default=0) >= DECADES * min(values, default=0)
    )
    logarithmic = spread and bool(values) and min(values) > 0
    layout = {
        "yaxis": {
            "type": "log" if logarithmic else "linear",
            "rangemode": "tozero" if name in ("lr", *SPEEDS, "peak_memory_gib") else "normal",
        }
    }
    shown = marks(histories[0]) if len(histories) == 1 else []
    return {"title": WORDS.get(name, name), "data": data, "layout": layout, "marks": shown, "steps": True}


def marks(history: History) -> list[dict[str, Any]]:
    """Return steps and times of the last 60 restarts, failures, preemptions, deaths, world size changes and stragglers."""
    found: list[dict[str, Any]] = []
    size = None
    for line in history.events:
        step, what = line.get("step"), None
        if line["event"] == "resume":
            if line not in history.begins:
                continue
            grown = size not in (None, line.get("world_size"))
            what = f"resumed on {line['world_size']} ranks" if grown else "resumed"
        elif line["event"] == "preempted":
            what = "preempted"
        elif line["event"] == "failed":
            what = f"rank {line.get('rank')} failed"
        elif line["event"] == "straggler":
            what = f"rank {line['rank']} late"
        elif line["event"] == "survived":
            what = f"rank {line['rank']} died on {line['host']} and is restarted in place"
        size = line.get("world_size", size)
        if what and step is not None:
            if found and found[-1]["step"] == step:
                what = f"{found.pop()['what']}, {what}"
            found.append({"step": step, "time": _rounded(history.time_of(step)), "what": what})
    return found[-60:]


def where_time_went(histories: Sequence[History]) -> Figure | None:
    """One bar per run: the shares of its wall-clock time."""
    known = [history for history in histories if history.seconds][::-1]
    if not known:
        return None
    data = [
        {
            "name": part, "y": [history.name for history in known],
            "x": [round(100 * history.spent[part] / history.seconds, 2) for history in known],
            "customdata": [duration(history.spent[part]) for history in known],
            "text": [f"{part} {100 * history.spent[part] / history.seconds:.0f} %" for history in known],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "inside",  # or it is left out
            "hovertemplate": f"{part}: %{{x:.1f}} %, %{{customdata}}<extra></extra>", "marker": {"color": COLOURS[part]},
        }
        for part in ("steps", *LOSSES)
        if any(history.spent[part] > 0.0005 * history.seconds for history in known)
    ]  # fmt: skip
    xaxis, yaxis = {"ticksuffix": " %", "range": [0, 100]}, {"showticklabels": len(known) > 1}
    return _bars("where the time went", data, xaxis, yaxis, height=190 + 28 * len(known))


def ranks(history: History) -> Figure | None:
    """Each rank's step time in the last attempt."""
    rows, hosts = history.by_rank, history.hosts
    if len(rows) < 2:
        return None
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)][::-1]
    data = [
        {
            "name": WORDS[part], "y": names,
            "x": [round(row[part], 3) for row in rows][::-1], "marker": {"color": COLOURS[part]},
            "hovertemplate": f"%{{y}} {WORDS[part]}: %{{x:.2f}} s<extra></extra>",
        }
        for part in ("compute", "data", "wait")
    ]  # fmt: skip
    height = 170 + 22 * len(rows)
    return _bars(
        "each rank's steps, in the last attempt", data, {"ticksuffix": " s"}, {"automargin": True}, height=height
    )


def _bars(title: str, data: list[Figure], xaxis: Figure, yaxis: Figure, *, height: int) -> Figure:
    traces = [{"type": "bar", "orientation": "h", **trace} for trace in data]
    layout = {"barmode": "stack", "xaxis": xaxis, "yaxis": {"type": "category", **yaxis}}
    return {"title": title, "data": traces, "layout": layout, "height": height, "wide": True}


def checkpoints(history: History) -> Figure | None:
    lines = _thinned(history.of_event("checkpoint"))
    if len(lines) < 2:
        return None
    trace = {
        "type": "scatter", "mode": "lines+markers", "name": "seconds to write", "x": [line["step"] for line in lines], "y": [line["seconds"] for line in lines],
        "times": [_rounded(history.time_of(line["step"])) for line in lines],
        "customdata": [f"{line['bytes'] / 1e6:.1f} MB" for line in lines],
        "hovertemplate": "step %{x}: %{y:.2f} s, %{customdata}<extra></extra>", "line": {"color": COLOURS["checkpoint"]},
    }  # fmt: skip
    title = "seconds to write a checkpoint, behind the training"
    return {"title": title, "data": [trace], "layout": {"yaxis": {"rangemode": "tozero"}}, "steps": True}


def parallel(histories: Sequence[History]) -> Figure | None:
    """Parallel coordinates of a sweep, one line per run: differing keys and results."""
    histories = [history for history in histories if history.config]  # others failed before they began
    if len(histories) < 3:
        return None
    axes = []
    for name, values in differing(list(histories)).items():
        axes.append(_axis(name, values))
    results = [
        history.last_values or ({"train loss": history.train[-1]["loss"]} if history.train else {})
        for history in histories
    ]
    for name in dict.fromkeys(name for each in results for name in each):
        axes.append(_axis(name, [each.get(name) for each in results]))
    axes = [axis for axis in axes if len(set(axis["values"])) > 1]
    if len(axes) < 2:
        return None
    last = axes[-1]["values"]
    trace = {
        "type": "parcoords",
        "dimensions": axes,
        "line": {"color": last, "colorscale": "Viridis", "showscale": True},
    }
    return {
        "title": "what was tried and what came of it",
        "data": [trace],
        "layout": {"margin": {"l": 70, "r": 50, "t": 50, "b": 30}},
        "height": 380,
        "wide": True,
    }


def _axis(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Other values than numbers become the index of their first occurrence."""
    if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        spread = min(values) > 0 and max(values) >= DECADES * min(values)
        return {"label": name, "values": list(values), **({"log": True} if spread else {})}
    words = list(dict.fromkeys(str(value) for value in values))
    return {
        "label": name,
        "values": [words.index(str(value)) for value in values],
        "tickvals": list(range(len(words))),
        "ticktext": words,
    }


def duration(seconds: float) -> str:
    """Return `3.0 s`, `4 min 5 s`, `2 h 3 min`, `5 d 2 h`."""
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.1f} s"
    for unit, size, lesser, of in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // of
            return f"{whole // size} {unit}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"


def _thinned(lines: Sequence[Any]) -> list[Any]:
    every = -(-len(lines) // MOST_POINTS) or 1
    return [*lines[-1::-every]][::-1]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
