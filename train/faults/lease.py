"""One run, one writer: a sign of life in the run's folder, so that a second job sees that the first is at work.

Rank 0 renews `.alive` every second. A job that finds the last attempt "running" watches it for a while: if it is
renewed, somebody is there. Only change is looked for, so clocks need not agree. A restart by the same launcher does
not wait, and an attempt that was cut off is kept from writing by outcome.is_latest.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from train.errors import ConfigError
from train.faults import attempts as outcome

RENEW_S = 1.0
WATCH_S = 3.5


def refuse_if_held(folder: Path, before: dict[str, Any]) -> None:
    """Raises ConfigError, naming the holder, if another launch of a job is writing to `folder`."""
    alive = folder / ".alive"
    if before.get("outcome") != outcome.RUNNING or not alive.exists():
        return
    first, deadline = alive.read_bytes(), time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(RENEW_S / 4)
        with contextlib.suppress(OSError):
            if alive.read_bytes() != first:
                raise ConfigError(
                    f"output_dir={folder} is in use by another job on {before.get('host')} (attempt {before.get('attempt')}, "
                    f"launcher {before.get('launcher')}): stop it, or give this one another name"
                )


class Lease:
    """Renews the sign of life until it is let go."""

    def __init__(self, folder: Path, attempt: str):
        self.path, self.attempt = folder / ".alive", attempt
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Stop, and remove the file if it is still ours."""
        self._ended.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            if self.path.read_text().startswith(self.attempt):
                self.path.unlink()

    def _renew(self) -> None:
        beat = 0
        while True:
            beat += 1
            with contextlib.suppress(OSError):  # a full disk is for the checkpoints to report
                draft = self.path.with_name(f".alive.{os.getpid()}")
                draft.write_text(f"{self.attempt} {beat}")
                os.replace(draft, self.path)
            if self._ended.wait(RENEW_S):
                return
