"""Check in a separate process, which imports Hydra and the user's modules, whether the trainer accepts overrides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.launcher.answer import asked
from muster.launcher.spec import ACCEPTS


def check(overrides: Sequence[str]) -> int:
    """Print the run's absolute folder, or the reason of a refusal on standard error. Return the exit code."""
    return subprocess.run(_line(overrides), check=False).returncode


def check_apart(overrides: Sequence[str]) -> tuple[int, list[Path]]:
    """Return the exit code and the folders of the run or the sweep's runs; prints the reason of a refusal."""
    code, folders = asked(_line(overrides))
    return code, [Path(line) for line in folders.splitlines()]


def answer(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `{"folder": ...}`, or `{"refused": [exit code, reason]}`."""
    _, found = asked(_line(["--json", *overrides]))
    lines = found.splitlines()
    return dict(json.loads(lines[-1])) if lines else {"refused": [1, "the overrides could not be checked: see above"]}


def _line(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ACCEPTS, *arguments]
