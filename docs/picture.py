"""Make README's picture of a report anew: `make picture`. Needs Chromium or Chrome (`apt-get install chromium`).

A run of the digits is preempted on two ranks and resumed on three; its report is opened in the browser, without a window.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURE = Path(__file__).parent / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STEPS, PREEMPTED_AT = 6900, 2300


def browser() -> str:
    """Return the path of the browser. Raises SystemExit if none is installed."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")
    return found[0]


def shoot(page: Path, picture: Path, width: int, height: int) -> None:
    """Write what a browser of `width` x `height` pixels shows of the HTML file `page` to `picture`, a PNG file.

    Browsers make no window narrower than 500 pixels; the page is shown in a frame, whose width is what it sees of the
    screen. Raises RuntimeError if the browser writes no picture.
    """
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.html")
        frame.write_text(
            f'<body style="margin:0"><iframe src="{page.resolve().as_uri()}" style="border:0;width:{width}px;height:{height}px">'
        )
        line = [
            browser(), "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder}/profile", f"--window-size={max(width, 500)},{height}", "--virtual-time-budget=10000",
            "--run-all-compositor-stages-before-draw", f"--screenshot={folder}/shot.png", frame.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        shot = Path(folder, "shot.png")
        if not shot.exists():
            raise RuntimeError(f"{line[0]} made no picture: {done.stderr[-500:]}")
        shutil.move(shot, picture)


def train(project: Path, ranks: int, preempt_at: int | None = None) -> None:
    """Train or resume runs/digits of `project` on that many ranks; send torchrun a SIGTERM once step `preempt_at` is logged.

    Raises RuntimeError if it does not end as it should.
    """
    line = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m", "muster", "name=digits",
        f"max_steps={STEPS}", "scheduler=cosine", "log.progress=none",
    ]  # fmt: skip
    process = subprocess.Popen(line, cwd=project, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = project / "runs/digits/metrics.jsonl"
    while preempt_at and process.poll() is None:
        if lines.exists() and f'"step": {preempt_at}' in lines.read_text():
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    if (code := process.wait()) and not preempt_at:
        raise RuntimeError(f"the run ended with exit code {code}")


def main() -> None:
    """Train, and draw docs/report.png, or the PNG file that is given."""
    browser()
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    with tempfile.TemporaryDirectory() as scratch:
        train(Path(scratch), 2, PREEMPTED_AT)
        train(Path(scratch), 3)
        shoot(Path(scratch, "runs/digits/report.html"), picture, 1100, 1725)
    print(picture)


if __name__ == "__main__":
    main()
