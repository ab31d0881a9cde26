"""report.html: a report on one run or several, in one file that needs no network."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml

from muster.checkpoint.records import read_best
from muster.files import replace_file
from muster.loggers.console import several
from muster.report import failure, figures
from muster.report.figures import Figure, duration
from muster.report.history import History, differing

NAME = "report.html"
LAST = 200
"""Maximum number of events shown; the last ones are."""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html about the run in `folder`. Raises OSError, StorageError."""
    return write_page([History.of(folder)], folder / NAME)


def write_page(histories: Sequence[History], path: Path) -> Path:
    """Write one page about all `histories` to `path`. Raises OSError, StorageError."""
    page = Page()
    if len(histories) == 1:
        title = f"Run {histories[0].name}"
        body = one(histories[0], page)
    else:
        title = f"{len(histories)} runs"
        body = compared(histories, page)
    text = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title), body="\n".join(body), figures=_json(page.figures), script=plotly()
    )
    replace_file(path, lambda draft: draft.write_text(text))
    return path


def plotly() -> str:
    """Return Plotly's script from its installed package. Raises FileNotFoundError."""
    found = find_spec("plotly")  # not imported: that would take longer than the rest of the page
    if not found or not found.origin:
        raise FileNotFoundError("plotly is not installed: pip install plotly")
    return Path(found.origin).with_name("package_data").joinpath("plotly.min.js").read_text()


class Page:
    """The figures of a page; the script draws each in the element with its number."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def plots(self, wanted: Iterable[Figure | None]) -> str:
        """Add figures, except None, and return the HTML for them."""
        return f'<div class="plots">{"".join(self._plot(figure) for figure in wanted if figure)}</div>'

    def _plot(self, figure: Figure) -> str:
        number = len(self.figures)
        self.figures.append(figure)
        log = f'<button data-log="{number}">log / linear</button>' if figure.get("steps") else ""
        wide = ' class="wide"' if figure.get("wide") else ""
        return f'<figure{wide}><figcaption>{escape(figure["title"])}{log}</figcaption><div id="plot{number}"></div></figure>'


def one(history: History, page: Page) -> list[str]:
    """Return the body of a page about one run."""
    facts = {
        "steps": f"{history.step:,}" + (f" of {history.total_steps:,}" if history.total_steps else ""),
        "duration": duration(history.seconds),
        "goodput": _percent(history.goodput),
        "ranks": f"{history.world_size or '?'} on {several(len(set(history.hosts)), 'host')}",
        "attempts": str(history.attempts),
        **({"deaths survived": _deaths(history)} if history.deaths else {}),
        "samples a second, median": _speed(history),
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
    return [
        f'<h1>{escape(history.name)} <span class="state {_class(history)}">{escape(history.state.replace("_", " "))}</span></h1>',
        f'<p class="dim">{escape(_when(history))}</p>',
        *failure.shown(history),
        _facts(facts),
        '<h2>Curves <button id="over">over time</button></h2>',
        page.plots(figures.curves([history])),
        "<h2>Time</h2>",
        page.plots([figures.where_time_went([history]), figures.ranks(history), figures.checkpoints(history)]),
        _table(
            ("", "seconds", "share"),
            [
                (part, f"{seconds:.1f}", _percent(seconds / history.seconds))
                for part, seconds in history.spent.items()
                if history.seconds and seconds > 0.0005 * history.seconds
            ],
        ),
        "<h2>What is kept, and what was seen</h2>",
        _table(
            (),
            [
                ("checkpoints", saved),
                ("samples", ("" if fits is None else "✓ " if fits else "✗ ") + ledger),
                *((f"best {line}", str(value)) for line, value in _best(history).items()),
            ],
        ),
        "<h2>What happened</h2>",
        _events(history),
        "<details><summary>Environment</summary>",
        _table((), sorted((str(name), str(value)) for name, value in _environment(history).items())),
        "</details><details><summary>Configuration</summary>",
        f"<pre>{escape(yaml.safe_dump(history.config, sort_keys=False))}</pre></details>",
    ]


def _class(history: History) -> str:
    return "bad" if failure.has_failed(history) else escape(history.state)


def compared(histories: Sequence[History], page: Page) -> list[str]:
    """Return the body of a page about several runs."""
    differs = differing(list(histories))
    values = list(dict.fromkeys(name for history in histories for name in history.last_values))
    head = ("run", "", *differs, "step", *values, "samples/s", "duration", "goodput")
    rows = [
        (
            history.name,
            history.state,
            *(str(column[number]) for column in differs.values()),
            f"{history.step:,}",
            *(
                f"{history.last_values[name]:.4g}" if history.last_values.get(name) is not None else ""
                for name in values
            ),
            _speed(history),
            duration(history.seconds),
            _percent(history.goodput),
        )
        for number, history in enumerate(histories)
    ]
    return [
        f"<h1>{len(histories)} runs</h1>",
        _table(head, rows),
        page.plots([figures.parallel(histories)]),
        '<h2>Curves <button id="over">over time</button></h2>',
        page.plots(figures.curves(histories)),
        "<h2>Time</h2>",
        page.plots([figures.where_time_went(histories)]),
        "<details><summary>Configurations</summary>",
        *(
            f"<h3>{escape(h.name)}</h3><pre>{escape(yaml.safe_dump(h.config, sort_keys=False))}</pre>"
            for h in histories
        ),
        "</details>",
    ]


def _events(history: History) -> str:
    told = [line for line in history.events if line["event"] != "checkpoint"]
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"])) if "time" in line else "",
            line["event"],
            ", ".join(f"{name} {value}" for name, value in line.items() if name not in ("kind", "event", "time")),
        )
        for line in told[-LAST:]
    ]
    return _table((), rows) + (f'<p class="dim">and {len(told) - LAST} before</p>' if len(told) > LAST else "")


def _environment(history: History) -> dict[str, Any]:
    facts = history.stretches[-1].facts if history.stretches else {}
    begin = history.begins[-1] if history.begins else {}
    known = {"hosts": ", ".join(facts.get("hosts", ())), "device": begin.get("device"), **facts.get("environment", {})}
    return {name: value for name, value in known.items() if value and name != "resumes"}


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
    """Return the number of deaths, and their hosts, first the one with most of them."""
    by_host = Counter(str(line.get("host", "?")) for line in history.deaths).most_common()
    return f"{len(history.deaths)} on {', '.join(f'{host} ({number})' if len(by_host) > 1 else host for host, number in by_host[:3])}"


def _speed(history: History) -> str:
    speeds = sorted(line["samples_per_s"] for line in history.train)
    return f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "?"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def _facts(facts: dict[str, str]) -> str:
    return f'<div class="facts">{"".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts.items())}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def _cell(text: str) -> str:
    number = text.replace(",", "").replace(".", "", 1).replace(" %", "").removeprefix("-").isdigit()
    return f"<td{' class=n' if number else ''}>{escape(text)}</td>"


def _json(value: Any) -> str:
    """Return JSON for a script element; `</` is escaped, as it could end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
