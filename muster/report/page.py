"""report.html: a report on one run or several, in one file that needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from muster.checkpoint.schemas import read_best
from muster.files import replace_file
from muster.loggers.console import several
from muster.report import failure, figures
from muster.report.figures import Figure, duration
from muster.report.history import History, differing, ranked
from muster.report.results import Result, metric_of

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

NAME = "report.html"
LAST = 200
"""The most events that are shown."""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html. Raises OSError, StorageError."""
    return write_page([History.of(folder)], folder / NAME)


def write_page(histories: Sequence[History], path: Path) -> Path:
    """Raises OSError, StorageError."""
    is_one = len(histories) == 1
    title = f"Run {histories[0].name}" if is_one else f"{len(histories)} runs"
    values = one(histories[0], path.parent) if is_one else compared(ranked(histories), path.parent)
    text = template().render(title=title, page=Page(), script=plotly(), **values)
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    return path


@cache
def template() -> Template:
    """Return the page's template, which escapes every value."""
    from jinja2 import Environment  # here: a run needs it at its end only

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(failure=failure, figures=figures, is_number=is_number, as_yaml=as_yaml)
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


@cache
def plotly() -> str:
    """Return Plotly's script, gzipped, in base64: 1.9 MB of 4.7, for each page of a sweep. Raises FileNotFoundError.

    Every browser since 2023 has DecompressionStream.
    """
    found = find_spec("plotly")  # not imported: that would take longer than the rest of the page
    if not found or not found.origin:
        raise FileNotFoundError("plotly is not installed: pip install plotly")
    script = Path(found.origin).with_name("package_data").joinpath("plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(script, compresslevel=6, mtime=0)).decode()


FILES = (
    "metrics.jsonl",
    "timing.jsonl",
    "outcome.json",
    "config.yaml",
    "checkpoints",
    "tensorboard",
    "model.pt",
    "model.json",
)


class Anchor(NamedTuple):
    href: str
    words: str


class Plot(NamedTuple):
    """A figure's place on the page. span: of 12 columns. steps: whether its x axis is steps."""

    number: int
    title: str
    span: int
    steps: bool


def links(history: History, start: Path) -> list[Anchor]:
    """Return links to a run's files and logs, relative to the page's folder `start`."""
    there = [_link(history.folder / name, start, name) for name in FILES if (history.folder / name).exists()]
    return there + [_link(log, start, log.name) for log in history.logs if log.is_file()]


def _link(path: Path, start: Path, words: str) -> Anchor:
    return Anchor(quote(Path(os.path.relpath(path.absolute(), start.absolute())).as_posix()), words)


class Page:
    """A page's figures; the script draws each in the element with its number."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def plots(self, wanted: Iterable[Figure | None]) -> list[Plot]:
        """Add figures, and return their places."""
        known = [figure for figure in wanted if figure]
        narrow = iter(spans(sum(not figure.get("wide") for figure in known)))
        self.figures += known
        first = len(self.figures) - len(known)
        return [
            Plot(number, figure["title"], 12 if figure.get("wide") else next(narrow), bool(figure.get("steps")))
            for number, figure in enumerate(known, first)
        ]

    def json(self) -> Markup:
        """Return the figures for a script element, which `</` could end."""
        from markupsafe import Markup

        text = json.dumps(self.figures, allow_nan=False, separators=(",", ":"))
        return Markup(text.replace("</", "<\\/"))


def spans(number: int) -> list[int]:
    """Return how many of 12 columns each figure takes: rows of three, and of two where one would be alone."""
    pairs = {0: 0, 1: 2, 2: 1}[number % 3] if number > 1 else 0
    return [12] if number == 1 else [4] * (number - 2 * pairs) + [6] * (2 * pairs)


def one(history: History, start: Path) -> dict[str, Any]:
    """Return the template's values for one run. start: the page's folder."""
    facts = {
        "steps": f"{history.step:,}" + (f" of {history.total_steps:,}" if history.total_steps else ""),
        "duration": duration(history.seconds),
        "goodput": _percent(history.goodput),
        "ranks": f"{history.world_size or '?'} on {several(len(set(history.hosts)), 'host')}",
        "attempts": str(history.attempts),
        **({"deaths survived": _deaths(history)} if history.deaths else {}),
        "samples a second, median": _speed(history),
        **_of_devices(history),
        **_memory(history),
        **{f"test {name}": f"{value:.4g}" for name, value in history.last_values.items() if value is not None},
    }
    if history.train and history.train[-1]["loss"] is not None:
        facts["train loss"] = f"{history.train[-1]['loss']:.4g}"
    fits, ledger = history.ledger
    blocked = history.spent["checkpoint"]
    saves = history.of_event("checkpoint")
    saved = (
        f"{several(len(saves), 'checkpoint')}, the last of {saves[-1]['bytes'] / 1e6:.1f} MB; training stood still for {blocked:.1f} s for them"
        if saves
        else "none"
    )
    told = [line for line in history.events if line["event"] != "checkpoint"]
    return {
        "history": history,
        "when": _when(history),
        "links": links(history, start),
        "facts": facts,
        "marks": figures.marks(history),
        "times": [
            (part, f"{seconds:.1f}", _percent(seconds / history.seconds), MEANINGS[part])
            for part, seconds in history.spent.items()
            if history.seconds and seconds > 0.0005 * history.seconds
        ],
        "kept": [
            ("checkpoints", saved),
            ("samples", ("" if fits is None else "✓ " if fits else "✗ ") + ledger),
            *((f"best {line}", str(value)) for line, value in _best(history).items()),
        ],
        "events": [_event(line) for line in told[-LAST:]],
        "more_events": len(told) - LAST,
        "environment": sorted((str(name), str(value)) for name, value in _environment(history).items()),
    }


MEANINGS = {
    "steps": "training steps that count, with the waits of ranks for each other",
    "down": "between the end of an attempt and the start of the next process",
    "start": "from the first process to the first step: imports, ranks that meet, data and model",
    "restart": "from the process of a later attempt to its first step, with the checkpoint that is read",
    "survived deaths": "from the last step of a rank that died, or hung, until it was restarted in place",
    "repeated steps": "steps that were done again, as no checkpoint had them",
    "data wait": "waits for the next batch",
    "checkpoint": "stops for copying the state; it is written behind the training",
    "evaluation": "evaluations",
}


def _memory(history: History) -> dict[str, str]:
    """Return rank 0's peaks over all attempts whose end is on record, and the GPU's name."""
    known = [(stretch.end or {}).get("memory_mb", {}) for stretch in history.stretches]
    environment = history.stretches[-1].facts.get("environment", {}) if history.stretches else {}
    peaks = {
        f"{words}, rank 0 at most": f"{max(values) / 1000:.2f} GB"
        for name, words in (("ram", "memory"), ("gpu", "GPU memory"))
        if (values := [each[name] for each in known if name in each])
    }
    return peaks | ({"GPU": str(environment["gpu"])} if environment.get("gpu") else {})


def compared(histories: Sequence[History], start: Path) -> dict[str, Any]:
    """Return the template's values for several runs, best first. start: the page's folder."""
    differs, found = differing(list(histories)), [Result.of(history.folder, history.lines) for history in histories]
    key = metric_of(found)
    values = list(dict.fromkeys(name for result in found for name in result.values))
    rows = [
        (
            _named(history, start),
            history.state.replace("_", " "),
            *(str(column[number]) if history.config else "" for column in differs.values()),
            f"{history.step:,}",
            *(
                f"{found[number].value(name):.4g}" if math.isfinite(found[number].value(name)) else ""
                for name in values
            ),
            _speed(history),
            duration(history.seconds),
            _percent(history.goodput),
        )
        for number, history in enumerate(histories)
    ]
    which = f"best {key} {'that checkpoint.best kept' if found[0].metric == key else 'of a last evaluation'}"
    return {
        "histories": histories,
        "head": ("run", "", *differs, "step", *values, "samples/s", "duration", "goodput"),
        "rows": rows,
        "which": which if math.isfinite(found[0].value(key)) else "",
    }


def _named(history: History, start: Path) -> Anchor | str:
    there = (history.folder / NAME).exists()
    return _link(history.folder / NAME, start, history.name) if there else history.name


def _event(line: dict[str, Any]) -> tuple[str, str, str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"])) if "time" in line else ""
    known = (f"{name} {value}" for name, value in line.items() if name not in ("kind", "event", "time"))
    return when, line["event"], ", ".join(known)


def _environment(history: History) -> dict[str, Any]:
    facts = history.stretches[-1].facts if history.stretches else {}
    begin = history.begins[-1] if history.begins else {}
    known = {"hosts": ", ".join(facts.get("hosts", ())), "device": begin.get("device"), **facts.get("environment", {})}
    return {name: value for name, value in known.items() if value and name not in ("resumes", "log")}


def _best(history: History) -> dict[str, Any]:
    best = read_best(history.folder)
    return {best.metric: f"{best.value:.6g} at step {best.step}, {best.path}"} if best else {}


def _when(history: History) -> str:
    if not history.stretches:
        return str(history.folder)
    began, ended = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        for at in (history.stretches[0].began, history.stretches[-1].ended)
    )
    return f"{began} to {ended} · {history.folder}"


def _deaths(history: History) -> str:
    by_host = Counter(str(line.get("host", "?")) for line in history.deaths).most_common()
    return f"{len(history.deaths)} on {', '.join(f'{host} ({number})' if len(by_host) > 1 else host for host, number in by_host[:3])}"


def _speed(history: History) -> str:
    speed = _median(history, "samples_per_s")
    return "?" if speed is None else f"{speed:,.0f}"


def _of_devices(history: History) -> dict[str, str]:
    tokens, share = _median(history, "tokens_per_s"), _median(history, "mfu")
    memory = max((line["peak_memory_gib"] for line in history.train if line.get("peak_memory_gib")), default=None)
    return {
        **({"tokens a second, median": f"{tokens:,.0f}"} if tokens else {}),
        **({"MFU, median": _percent(share)} if share else {}),
        **({"device memory, most": f"{memory:.1f} GiB"} if memory else {}),
    }


def _median(history: History, name: str) -> float | None:
    values = sorted(line[name] for line in history.train if line.get(name) is not None)
    return values[len(values) // 2] if values else None


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def is_number(cell: Any) -> bool:
    return (
        isinstance(cell, str)
        and cell.replace(",", "").replace(".", "", 1).replace(" %", "").removeprefix("-").isdigit()
    )


def as_yaml(config: Any) -> str:
    return str(yaml.safe_dump(config, sort_keys=False))
