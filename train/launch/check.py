"""Whether `python -m train` would accept some overrides, and the folder of the run that they describe."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import ConfigError, one_line, say

if TYPE_CHECKING:
    from train.config.keys import Config


def check(overrides: Sequence[str]) -> int:
    """Print the run's folder, in full, and nothing else: what a user's module prints goes to standard error."""
    from train.config.compose import run_each  # Hydra: not for the commands that check nothing

    sys.argv[1:] = overrides
    with contextlib.redirect_stdout(sys.stderr):
        return run_each(_folder)


def _folder(config: Config | ConfigError) -> int:
    if isinstance(config, ConfigError):
        say(f"muster: config error: {one_line(config)}")
        return config.exit_code
    print(Path(config.output_dir).resolve(), file=sys.__stdout__)
    return 0


def check_apart(overrides: Sequence[str]) -> tuple[int, Path]:
    """The same in a process of its own, which takes what it imported with it: the exit code and the folder."""
    line = [sys.executable, "-m", "train.launch", "check", *overrides]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, Path(done.stdout.rstrip("\n"))
