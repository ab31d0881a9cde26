"""Whether the trainer would accept some overrides, and the folder of the run that they describe.

The trainer is asked in a process of its own, which takes with it what it imported: Hydra, and a user's modules.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.launch.spec import ACCEPTS


def check(overrides: Sequence[str]) -> int:
    """Print the run's folder, in full, and nothing else; or the reason on standard error. The exit code."""
    return subprocess.run(_line(overrides), check=False).returncode


def check_apart(overrides: Sequence[str]) -> tuple[int, Path]:
    """The exit code and the folder; the reason of a refusal is printed."""
    done = subprocess.run(_line(overrides), stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, Path(done.stdout.rstrip("\n"))


def answer(overrides: Sequence[str]) -> dict[str, Any]:
    """`{"folder": ...}`, or `{"refused": [exit code, reason]}`."""
    done = subprocess.run(_line(["--json", *overrides]), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    return dict(json.loads(lines[-1])) if lines else {"refused": [1, "the overrides could not be checked: see above"]}


def _line(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ACCEPTS, *arguments]
