"""report.html: one page, in one file, on what a run did."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from train.files import replace_file
from train.loggers.jsonl import read

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
 h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }} svg {{ width: 100%; height: auto }}
 table {{ border-collapse: collapse }} td, th {{ padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }}
 pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto }}
</style>
<h1>{title}</h1>
<table>{summary}</table>
{figure}
<h2>What happened</h2>
<table>{events}</table>
<h2>Configuration</h2>
<pre>{config}</pre>
</html>
"""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from metrics.jsonl and config.yaml. Raises StorageError."""
    lines = read(folder / "metrics.jsonl")
    config = (folder / "config.yaml").read_text() if (folder / "config.yaml").exists() else ""
    page = PAGE.format(
        title=html.escape(f"Run {folder.resolve().name}"),
        summary=_rows(_summary(lines)),
        figure=figure(lines),
        events=_rows(
            [
                (line["event"], _details(line))
                for line in lines
                if line["kind"] == "event" and line["event"] != "checkpoint"
            ]
        ),
        config=html.escape(config),
    )
    path = folder / "report.html"
    replace_file(path, lambda draft: draft.write_text(page))
    return path


def figure(lines: list[dict[str, Any]], *, file_format: str = "svg") -> Any:
    """Loss, accuracy and speed over steps: SVG text, or the bytes of another format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    train = [line for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    resumed = [line["step"] for line in lines if line.get("event") == "resume"]
    plots, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    axes[0].plot([l["step"] for l in train], [l["loss"] for l in train], label="train, per step", lw=1)
    axes[0].plot([l["step"] for l in evals], [l["loss"] for l in evals], label="test", marker="o", ms=3)
    if all(line["loss"] and line["loss"] > 0 for line in train):
        axes[0].set_yscale("log")
    axes[0].set_title("loss")
    for name in sorted({name for line in evals for name in line} - {"kind", "step", "epoch", "loss"}):
        axes[1].plot(
            [l["step"] for l in evals], [l.get(name) for l in evals], label=f"test {name}", marker="o", ms=3, color="C1"
        )
    axes[1].set_title("test")
    axes[2].plot([l["step"] for l in train], [l["samples_per_s"] for l in train], lw=1, color="C2", label="samples/s")
    axes[2].set_title("speed")
    axes[2].set_ylim(bottom=0)
    for axis in axes:
        for number, step in enumerate(resumed):
            axis.axvline(step, color="0.6", lw=1, ls=":", label=None if number else "resumed")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    buffer = io.BytesIO()
    plots.savefig(buffer, format=file_format, dpi=110)
    plt.close(plots)
    return buffer.getvalue().decode() if file_format == "svg" else buffer.getvalue()


def _summary(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    train = [line for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    starts = [line for line in lines if line.get("event") in ("start", "resume")]
    rows = [("attempts", str(len(starts)))]
    if starts:
        rows.append(("ranks", str(starts[-1]["world_size"])))
    if train:
        rows += [
            ("steps", str(train[-1]["step"])),
            ("samples", str(train[-1]["samples"])),
            ("train loss", f"{train[-1]['loss']:.4f}"),
        ]
        speeds = sorted(line["samples_per_s"] for line in train)
        rows.append(("median speed", f"{speeds[len(speeds) // 2]:.0f} samples/s"))
    if evals:
        rows += [
            (f"test {name}", f"{value:.4f}")
            for name, value in evals[-1].items()
            if name not in ("kind", "step", "epoch")
        ]
    return rows


def _details(line: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("kind", "event", "time"))


def _rows(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in pairs)
