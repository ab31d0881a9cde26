"""Whether `python -m train` would accept some overrides, and the folder of the run that they describe."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def check(overrides: Sequence[str]) -> int:
    """Print the run's folder, in full, and nothing else: what a user's module prints goes to standard error."""
    from train.entry import main  # Hydra: not for the commands that check nothing

    sys.argv[1:] = overrides
    with contextlib.redirect_stdout(sys.stderr):
        return main(None)


def check_apart(overrides: Sequence[str]) -> tuple[int, Path]:
    """The same in a process of its own, which takes what it imported with it: the exit code and the folder."""
    line = [sys.executable, "-m", "train.launch", "check", *overrides]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, Path(done.stdout.rstrip("\n"))
