"""A command's answer to the script that started it, on a standard output to which banners, `sitecustomize` and C libraries print, too.

The caller sets ANSWER to a random word; the answer stands between two lines with it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

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
