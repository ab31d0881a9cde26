"""A command's answer to the script that started it, on a standard output to which banners, `sitecustomize` and C libraries print, too.

The caller sets ANSWER to a random word; the answer stands between two lines with it. So a process of its own,
which imports Hydra and the user's modules, says whether the trainer accepts overrides.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from muster.launcher.spec import ACCEPTS

ANSWER = "MUSTER_ANSWER"
"""Variable with the word; without one, as in a terminal, the answer alone is printed."""


def give(text: str, to: TextIO | None = None) -> None:
    """Print `text` as the answer, or a part of it. `to`: standard output, if `sys.stdout` is another stream now."""
    mark = os.environ.get(ANSWER)
    print(f"\n{mark}\n{text}\n{mark}" if mark else text, file=to, flush=True)


def asked(line: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its exit code and its answer. The rest of its output goes to standard error."""
    mark = secrets.token_hex(16)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env={**os.environ, ANSWER: mark}, check=False)
    parts = done.stdout.split(f"\n{mark}\n")
    sys.stderr.write("".join(parts[::2]))
    return done.returncode, "\n".join(parts[1::2])


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
