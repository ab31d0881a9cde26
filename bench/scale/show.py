"""Output of a prediction as a table and a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.scale.job import ScaledJob
from bench.scale.strategies import CostedStep
from muster.collectives.algorithm import Network
from muster.collectives.table import WIDTH
from muster.files import replace_file

Prediction = dict[str, dict[int, CostedStep]]
"""Strategy -> world size -> step."""
SHOWN = (8, 64, 512, 4096, 16384)
MARKS = "osD^vP*X"


def show(prediction: Prediction) -> None:
    """Print tables of seconds, GB of memory and GB sent: one row per strategy, one column per world size."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    for title, value in (
        ("seconds a step, everything sent hidden behind computation - nothing hidden", _seconds),
        ("GB of memory a rank", lambda step: _figure(step.memory_bytes / 1e9)),
        ("GB that the busiest rank sends a step", lambda step: _figure(step.sent_bytes / 1e9)),
    ):
        console.print(table(prediction, title, value))


def table(prediction: Prediction, title: str, value: Callable[[CostedStep], str]) -> Table:
    """Return a table with one row per strategy and one column per world size."""
    result = Table("ranks", *(f"{world_size:,}" for world_size in SHOWN), title=title, title_justify="left")
    for name, steps in prediction.items():
        result.add_row(name, *(value(steps[world_size]) for world_size in SHOWN))
    return result


def draw(prediction: Prediction, job: ScaledJob, path: Path) -> None:
    """Write a PNG with one panel each for time, memory and bytes. Raises StorageError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: tuple[tuple[str, Callable[[CostedStep], float]], ...] = (
        ("seconds a step, nothing hidden", lambda step: step.seconds),
        ("GB of memory a rank", lambda step: step.memory_bytes / 1e9),
        ("GB that the busiest rank sends a step", lambda step: step.sent_bytes / 1e9),
    )
    picture, axes = plt.subplots(1, len(panels), figsize=(15, 4.8))
    for axis, (title, value) in zip(axes, panels, strict=True):
        for at, (name, steps) in enumerate(prediction.items()):
            points = [value(step) for step in steps.values()]
            width = 11 - 8 * at / len(prediction)  # hollow, of decreasing size: coinciding points stay visible
            axis.plot(list(steps), points, f"{MARKS[at]}-", label=name, ms=width, mfc="none", mew=1.3, lw=1.2)
        axis.set_xscale("log", base=2)
        if "memory" in title:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
        axis.set_xticks(SHOWN, [f"{world_size:,}" for world_size in SHOWN])
        axis.set_xlabel("ranks")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    picture.suptitle(f"A model, not a measurement: no hardware ran this. {assumed(job)}", fontsize=10)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(prediction), frameon=False)
    picture.tight_layout(rect=(0, 0.07, 1, 1))
    replace_file(path, lambda draft: picture.savefig(draft, format="png", dpi=100))
    plt.close(picture)


def assumed(job: ScaledJob) -> str:
    """Return the constants of a prediction in one line."""
    machine, parameters = job.machine, job.workload.parameters
    size = f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
    return (
        f"Assumed: {size} parameters; {machine.flops_per_s / 1e12:.3g} TFLOP/s a rank; "
        f"{_network(machine.outer)} between nodes of {machine.node_size}, {_network(machine.inner)} inside"
    )


def _network(network: Network) -> str:
    return f"{network.alpha_s * 1e6:.3g} us and {1e-9 / network.beta_s:.3g} GB/s"


def _seconds(step: CostedStep) -> str:
    return f"{_figure(step.least_seconds)} - {_figure(step.seconds)}"


def _figure(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "0" if value == 0 else "< 0.001"
